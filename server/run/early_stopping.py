"""Early stopping: end the rounds once the mean validation score has not improved for ``patience`` rounds."""

from __future__ import annotations

from server.run.recorder import Recorder
from server.run.reporter import Reporter
from strategies.base.settings import Common
from strategies.base.strategy import PersonalizedStrategy

UNVALIDATED = "no silo has reported a validation score so far, and without any the run does not stop early"


class EarlyStopping:
    """Last round of one run: the last planned one, or an earlier one once the run has stopped early."""

    def __init__(self, common: Common, recorder: Recorder, reporter: Reporter) -> None:
        self.common, self.recorder, self.reporter = common, recorder, reporter
        self.last = common.rounds

    def may_stop(self, server_round: int) -> bool:
        """Return whether early stopping may end the run after this round, so that all states must be saved."""
        c, since = self.common, self.recorder.improved.round
        evaluated = bool(c.evaluate_every) and server_round % c.evaluate_every == 0
        return bool(c.patience and since and evaluated) and server_round - since >= c.patience

    def check(self, strategy: PersonalizedStrategy, done: int) -> None:
        """End the run after round ``done`` if it is evaluated and the last better one is ``patience`` rounds old."""
        c, improved = self.common, self.recorder.improved
        if done < c.rounds and self.may_stop(done) and improved.evaluated == done:
            self.last = strategy.last_round = done
            self.reporter.stopped_early(done, improved.round)
        elif c.patience and done == c.evaluate_every and not improved.validated:
            self.reporter.note(f"patience = {c.patience}: {UNVALIDATED}")

    def resume(self, strategy: PersonalizedStrategy) -> None:
        """Plan all rounds again after the run has gone back to an earlier one."""
        self.last = strategy.last_round = self.common.rounds

    def reason(self) -> dict[str, float] | None:
        """Return the figures of the early stop; None if the run did all planned rounds."""
        c, since = self.common, self.recorder.improved.round
        early = {"since": since, "planned": c.rounds, "patience": c.patience, "min_delta": c.min_delta}
        return early if self.last < c.rounds else None
