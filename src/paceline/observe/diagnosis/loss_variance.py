"""Why the loss jumps from step to step: a regression of the step loss on what the step's window held.

Both sides are first compared with the mean of their two neighbours, which removes whatever is straight over three
steps, so that learning itself explains nothing. The coefficients are those of the levels: the comparison is linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.observe.run_history import History

MIN_STEPS = 40
"""Fewer lines than this say nothing about jitter."""
FIRST_SHARE, FIRST_STEPS = 0.1, 500
"""Share of the planned steps, at the start of a run, that is left out; of a long run, so many steps at most."""
LENGTH = "mean length"
MIN_SHARE = 0.3
"""Share of the variance that must be explained before anyone is named."""
MIN_JITTER = 0.03
"""Explained standard deviation, as a share of the loss, below which jitter is not worth a word: a level plan of four
micro-batches a step leaves two hundredths where the loss falls by a quarter nat each time the length doubles."""


@dataclass(frozen=True)
class Jitter:
    """What explains the jumps of the step loss.

    Attributes:
        steps: lines in the regression.
        deviation: standard deviation of the step loss around its trend, nat.
        relative: the same as a share of the mean loss.
        explained: share of its variance explained by the window's make-up, adjusted for the number of regressors.
        leader: regressor that alone explains most, such as ``bucket 5`` or ``tag code``; ``mean length`` where that
            explains more than all shares together; empty where nothing varies.
        leader_share: share of the variance that it explains alone.
        slope: change of the loss in nat from none of the leader to nothing but the leader; of the mean length, as it
            doubles.
    """

    steps: int
    deviation: float
    relative: float
    explained: float
    leader: str
    leader_share: float
    slope: float

    @property
    def notable(self) -> bool:
        """Whether the window's make-up moves the loss enough to say so."""
        return self.explained >= MIN_SHARE and self.relative * np.sqrt(self.explained) >= MIN_JITTER


def explain_jitter(run: History) -> Jitter | None:
    """Regress the step loss on the buckets' and tags' shares of the window's weight, and on the mean length.

    Returns:
        None where too few lines have a loss.
    """
    loss = run.series("loss")
    good = np.isfinite(loss)
    # A new drafter's first steps fall too steeply to say anything about what a step holds.
    good &= run.steps > min(FIRST_SHARE * run.total_steps, FIRST_STEPS)
    count = int(good.sum())
    if count < MIN_STEPS:
        return None
    loss = loss[good]
    target = _against_neighbours(loss)
    regressors: dict[str, np.ndarray] = {}
    for bucket in run.numbers("weight_share/bucket_{bucket}"):
        regressors[f"bucket {bucket}"] = run.counts(f"weight_share/bucket_{bucket}")[good]
    tags = {f"tag {tag}": run.counts(f"weight_share/tag_{tag}")[good] for tag in run.tags}
    # Where tags are many for the number of steps, those whose shares vary most are asked.
    ranked = sorted(tags, key=lambda name: float(np.var(tags[name])), reverse=True)
    regressors |= {name: tags[name] for name in ranked[: count // 10]}
    length = run.series("window/mean_length")[good]
    if np.isfinite(length).all() and (length > 0).all():
        regressors[LENGTH] = np.log2(length)
    columns = {name: _against_neighbours(column) for name, column in regressors.items()}
    columns = {name: column for name, column in columns.items() if np.std(column) > 1e-9}
    deviation = float(np.std(target) / np.sqrt(1.5))  # white noise becomes noise of 1 + 1/4 + 1/4 times its variance
    relative = deviation / abs(float(np.mean(loss))) if np.mean(loss) else 0.0
    if not columns or deviation == 0:
        return Jitter(count, deviation, relative, 0.0, "", 0.0, 0.0)
    shares = [name for name in columns if name != LENGTH]
    # The shares of all buckets sum to one (tags' may), so one of them says nothing new; least squares copes with that.
    explained = _adjusted(np.column_stack([columns[name] for name in shares]), target) if shares else 0.0
    # Few wide buckets do not tell lengths apart, and of many narrow ones a short run tells nothing; the length does.
    by_length = _adjusted(columns[LENGTH][:, None], target) if LENGTH in columns else 0.0
    alone = {name: _r_squared(column[:, None], target) for name, column in columns.items()}
    by_shares = bool(shares) and (explained >= by_length or LENGTH not in columns)
    leader = max(shares, key=lambda name: alone[name]) if by_shares else LENGTH
    explained, share, column = max(explained, by_length), alone[leader], columns[leader]
    slope = float(column @ target / (column @ column))
    return Jitter(count, deviation, relative, max(explained, 0.0), leader, share, slope)


def _against_neighbours(values: np.ndarray) -> np.ndarray:
    """Each value minus the mean of the one before and the one after, [n - 2]."""
    return values[1:-1] - (values[:-2] + values[2:]) / 2


def _r_squared(columns: np.ndarray, target: np.ndarray) -> float:
    centred = columns - columns.mean(axis=0)
    goal = target - target.mean()
    solution, *_ = np.linalg.lstsq(centred, goal, rcond=1e-9)
    return 1.0 - float(np.sum((goal - centred @ solution) ** 2) / np.sum(goal**2))


def _adjusted(columns: np.ndarray, target: np.ndarray) -> float:
    rank = int(np.linalg.matrix_rank(columns - columns.mean(axis=0), tol=1e-9))
    free = target.size - rank - 1
    return 1.0 - (1.0 - _r_squared(columns, target)) * (target.size - 1) / free if free > 0 else 0.0
