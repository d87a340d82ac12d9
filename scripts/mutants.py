"""Puts classic errors into functions of the package, one at a time, and names those that no test sees.

    python scripts/mutants.py                 # all, about half an hour on two cores
    python scripts/mutants.py drafter detach  # those whose name holds all these words
    python scripts/mutants.py --list

The errors are made on the syntax tree: in each function below, every node of a kind is changed once. So the list does
not depend on how a line is written; a function that is renamed must be renamed here, else the script says so. Nothing
is written to the package: each error is compiled in a process that was forked before the package was imported, and the
named tests run there. Some survivors change nothing that can be seen; whoever reads the list decides.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent.parent
SOURCE, TESTS = PROJECT / "src", PROJECT / "tests"
LIMIT_S = 600.0
"""For tests without an error. With one, three times as long as without and half a minute: then they hang, and the error
counts as seen."""

TARGETS: dict[str, tuple[str, str]] = {
    # module : functions                                        → tests that must see their errors
    "drafter.block_inputs": ("build_blocks", "drafter/test_block_inputs.py drafter/test_anchors.py"),
    "drafter.attention.dense": ("visible", "drafter/test_attention.py"),
    "drafter.attention.layout": ("ranges groups", "drafter/test_flex.py drafter/test_network.py"),
    "drafter.layers": ("rotary_table _rotated forward", "drafter/test_network.py"),
    "drafter.learner": ("step _losses _ratios", "drafter/test_learner.py"),
    "drafter.loss.weights": ("dpace_weights default_gamma normalize_weights", "drafter/test_weights.py"),
    "drafter.loss.terms": (
        "cross_entropy forward_kl total_variation likelihood_hybrid",
        "drafter/test_distillation.py",
    ),
    "drafter.noise": ("noise_ratio add_noise", "drafter/test_noise.py"),
    "drafter.schedule": ("at ramp", "drafter/test_schedule.py"),
    "drafter.optimizer": ("make_optimizers", "drafter/test_optimizer.py"),
    "drafter.tree": ("tree_streaks _rank_pairs", "drafter/test_tree.py"),
    "target_model.taps": ("default_taps check_taps", "target_model/test_taps.py"),
    "target_model.tap_guard": ("check_features _moments", "target_model/test_guard.py"),
    "target_model.row_check": ("leaks relative_errors", "target_model/test_row_check.py"),
    "decode.sampling": ("drafts judge", "decode/test_sampling.py"),
    "decode.draft_tree": ("_grow visible push", "decode/test_tree.py"),
    "decode.kv_cache": ("make_room keep", "decode/test_session.py decode/test_batched.py"),
    "pipeline.coordinator": ("_must_wait _step_taken _candidates", "pipeline/test_coordinator.py"),
    "pipeline.prefetch": ("take _full", "pipeline/test_prefetch.py"),
    "pipeline.feature_pool": ("write read _to_fp8 _from_fp8", "pipeline/test_pool.py"),
    "plan.epoch": ("plan_epoch batch window", "plan/test_epoch.py plan/test_properties.py"),
    "plan.buckets": ("bucket_edges even_edges", "plan/test_edges.py plan/test_batches.py"),
    "plan.schedules.stratified": ("stratify deal_strata", "plan/test_schedules.py"),
    "plan.rng": ("sorted_words fits_word ascending", "plan/test_rng.py"),
    "data.collate": ("collate", "data/test_collate.py"),
    "data.holdout": ("document_of is_held_out", "data/test_holdout.py"),
    "data.tokenize_rows": ("_usable _kept _fit", "data/test_tokenize_rows.py data/test_prepare.py"),
    "data.store": ("mask read", "data/test_store.py"),
}
LEFT_OUT = "not slow and not oracle and not sweep and not serving and not browser"

QUIETLY = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")

Change = Callable[[ast.AST], ast.AST | None]
"""A changed copy of a node; None for a node that this kind of error does not touch."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
}
COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Mod: ast.Mult,
}
DROPPED = ("detach", "float", "double", "clone", "contiguous", "clamp", "clamp_min", "cumsum")
SEEDS = ("seed", "epoch", "sample_ids", "step")


def _compare(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        return ast.Compare(node.left, [COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    return None


def _count(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp) and type(node.op) in COUNTED:
        return ast.BinOp(node.left, COUNTED[type(node.op)](), node.right)
    return None


def _index(node: ast.AST) -> ast.AST | None:
    whole = isinstance(node, ast.Constant) and type(node.value) is int
    return ast.Constant(node.value + 1) if whole else None


def _eps(node: ast.AST) -> ast.AST | None:
    number = isinstance(node, ast.Constant) and type(node.value) is float
    return ast.Constant(node.value * 3 + 0.1) if number else None


def _logic(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        return node.operand
    return None


def _detach(node: ast.AST) -> ast.AST | None:
    """A call of a method such as ``detach`` left out."""
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED
    return node.func.value if method else None


def _seed(node: ast.AST) -> ast.AST | None:
    """What a random number depends on, made the same for all."""
    read = isinstance(node, ast.Name) and node.id in SEEDS and isinstance(node.ctx, ast.Load)
    return ast.Constant(0) if read else None


def _extremum(node: ast.AST) -> ast.AST | None:
    names = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "argmax": "argmin"}
    if not isinstance(node, ast.Call):
        return None
    func = copy.copy(node.func)
    if isinstance(func, ast.Attribute) and func.attr in names:
        func.attr = names[func.attr]
    elif isinstance(func, ast.Name) and func.id in names:
        func.id = names[func.id]
    else:
        return None
    return ast.Call(func, node.args, node.keywords)


CHANGES: dict[str, Change] = {
    "mask or shift: compare": _compare,
    "normalizer: arithmetic": _count,
    "index: one more": _index,
    "eps: another number": _eps,
    "logic": _logic,
    "detach: call left out": _detach,
    "seed": _seed,
    "extremum": _extremum,
}


@dataclass(frozen=True)
class Mutant:
    """One error.

    Attributes:
        module: below ``paceline``.
        function: in which it is.
        kind: of `CHANGES`.
        number: which node of the function that the kind touches, counted from 0.
        tests: files that must see it.
        line, text: of the node, to be shown.
    """

    module: str
    function: str
    kind: str
    number: int
    tests: tuple[str, ...]
    line: int
    text: str

    @property
    def name(self) -> str:
        """Where and what, in a line."""
        return f"{self.module}:{self.line} {self.function}: {self.kind} in `{self.text}`"


def path_of(module: str) -> Path:
    """Source file of a module below ``paceline``."""
    return SOURCE / "paceline" / f"{module.replace('.', '/')}.py"


def touched(tree: ast.AST, function: str, kind: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node of the functions of this name that a kind of error changes, and what it becomes."""
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef) and outer.name == function:
            for statement in outer.body:
                for node in ast.walk(statement):
                    changed = CHANGES[kind](node)
                    if changed is not None:
                        yield node, ast.copy_location(changed, node)


def all_mutants() -> list[Mutant]:
    """Every error of every function.

    Raises:
        SystemExit: a function is no longer there.
    """
    found = []
    for module, (functions, tests) in TARGETS.items():
        tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        files = tuple(tests.split())
        if gone := [name for name in functions.split() if name not in defined]:
            raise SystemExit(
                f"{path_of(module)}: no function {', '.join(gone)}; give its new name in {Path(__file__).name}"
            )
        if gone := [name for name in files if not (TESTS / name).is_file()]:
            raise SystemExit(f"{TESTS}: no file {', '.join(gone)}; give its new name in {Path(__file__).name}")
        for function in functions.split():
            for kind in CHANGES:
                for number, (node, changed) in enumerate(touched(tree, function, kind)):
                    text = f"{ast.unparse(node)} → {ast.unparse(changed)}"[:100]
                    found.append(Mutant(module, function, kind, number, files, getattr(node, "lineno", 0), text))
    return found


def mutated(mutant: Mutant) -> ast.AST:
    """The syntax tree of a module with the error in it."""
    tree = ast.parse(path_of(mutant.module).read_text(encoding="utf-8"))
    node, changed = list(touched(tree, mutant.function, mutant.kind))[mutant.number]

    class Replace(ast.NodeTransformer):
        def visit(self, here: ast.AST) -> ast.AST:
            return changed if here is node else self.generic_visit(here)

    return ast.fix_missing_locations(Replace().visit(tree))


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with an error in it."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> object:
        """Never from a cache."""
        return compile(mutated(self._mutant), self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that has an error."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        """The module's place, with our loader."""
        if fullname != f"paceline.{self._mutant.module}":
            return None
        file = str(path_of(self._mutant.module))
        return importlib.machinery.ModuleSpec(fullname, Loader(fullname, file, self._mutant), origin=file)


def run_tests(tests: tuple[str, ...], mutant: Mutant | None, limit_s: float) -> tuple[str, float]:
    """Run tests in a forked process; ``seen`` where one failed or hung, ``survived`` where none did."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        code = 1
        with contextlib.suppress(BaseException):
            import pytest

            if mutant is not None:
                sys.meta_path.insert(0, Finder(mutant))
            files = [str(TESTS / name) for name in tests]
            code = int(pytest.main([*files, "-x", "-q", "-m", LEFT_OUT, *QUIETLY]))
        os._exit(code)
    while time.monotonic() - began < limit_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            spent_s = time.monotonic() - began
            return ("survived" if os.waitstatus_to_exitcode(status) == 0 else "seen"), spent_s
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)  # the session that the child has made: its own tests' processes too
    os.waitpid(child, 0)
    return "seen", time.monotonic() - began


def main() -> int:
    """Run what was asked for; exit code 1 where an error survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only errors whose name holds all of these")
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    parser.add_argument("--every", type=int, default=1, help="only each so manyth of them")
    arguments = parser.parse_args()
    mutants = [m for m in all_mutants() if all(word in m.name for word in arguments.words)][:: arguments.every]
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    sys.path.insert(0, str(TESTS))
    os.chdir(PROJECT)
    import hypothesis  # noqa: F401 - imported once, for all processes
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers.models.qwen3  # noqa: F401

    torch.set_num_threads(1)
    limits: dict[tuple[str, ...], float] = {}
    survivors = []
    for number, mutant in enumerate(mutants, 1):
        if mutant.tests not in limits:
            outcome, spent_s = run_tests(mutant.tests, None, LIMIT_S)
            if outcome != "survived":
                raise SystemExit(f"{' '.join(mutant.tests)}: fail without any error; repair them first")
            limits[mutant.tests] = 3 * spent_s + 30
        outcome, spent_s = run_tests(mutant.tests, mutant, limits[mutant.tests])
        if outcome == "survived":
            survivors.append(mutant)
        print(f"{number}/{len(mutants)} {outcome} ({spent_s:.1f} s) {mutant.name}", flush=True)
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} errors were seen; survivors:")
    print("\n".join(f"  {mutant.name}" for mutant in survivors) or "  none")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
