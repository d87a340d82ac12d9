"""What a vLLM or SGLang server counted, from the Prometheus text of its ``/metrics``.

vLLM counts blocks, drafts, accepted drafts, and accepted drafts of each slot. SGLang (names from its documentation; not
run here) counts target passes and generated tokens, and shows them when it is started with ``--enable-metrics``.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

VLLM, SGLANG = "vLLM", "SGLang"
GENERATED = {VLLM: "vllm:generation_tokens_total", SGLANG: "sglang:generation_tokens_total"}
"""The counter that shows which engine it is."""
PASSES = {VLLM: "vllm:spec_decode_num_drafts_total", SGLANG: "sglang:spec_verify_calls_total"}
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
BY_SLOT, SLOT = "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"


@dataclass(frozen=True, slots=True)
class Counters:
    """Numbers since the server's start, or between two looks at them.

    Attributes:
        engine: vLLM or SGLang.
        generated: tokens of answers.
        passes: target passes that verified a block, all requests together; None where it does not draft.
        drafted, accepted: drafts, and those that the target confirmed, also behind the end of an answer; None where it
            does not count them.
        by_slot: accepted drafts of each slot; empty where it does not count them.
    """

    engine: str
    generated: int
    passes: int | None
    drafted: int | None = None
    accepted: int | None = None
    by_slot: tuple[int, ...] = ()

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        return Counters(
            self.engine,
            self.generated - before.generated,
            _less(self.passes, before.passes),
            _less(self.drafted, before.drafted),
            _less(self.accepted, before.accepted),
            tuple(now - then for now, then in zip(self.by_slot, before.by_slot, strict=False)),
        )


def read_counters(text: str) -> Counters | None:
    """The counters in a server's metrics, summed over its ranks; None where they are of neither engine.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    wanted = {*GENERATED.values(), *PASSES.values(), DRAFTED, ACCEPTED}
    totals: dict[str, float] = {}
    slots: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            elif sample.name == BY_SLOT:
                place = int(sample.labels[SLOT])
                slots[place] = slots.get(place, 0.0) + sample.value
    engine = next((engine for engine, name in GENERATED.items() if name in totals), None)
    if engine is None:
        return None
    passes, drafted, accepted = (_whole(totals.get(name)) for name in (PASSES[engine], DRAFTED, ACCEPTED))
    by_slot = tuple(round(slots[place]) for place in sorted(slots))
    return Counters(engine, round(totals[GENERATED[engine]]), passes, drafted, accepted, by_slot)


def _whole(total: float | None) -> int | None:
    return None if total is None else round(total)


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None else now - (before or 0)
