# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What happens to a step whose loss or gradient is infinite or not a number."""

import math

from training.recipe import RunError, TrainRecipe


def explain_nonfinite(step: int, loss: float, grad_norm: float) -> str:
    """What is wrong with the numbers of a step, and what helps."""
    return (
        f"the loss is {loss} and the gradient's norm {grad_norm} at step {step}: lower optimizer.learning_rate or "
        "lengthen schedule.warmup_steps"
    )


class NonFiniteGuard:
    """Keeps steps with numbers that are not finite away from weights and optimiser.

    Args:
        recipe: with ``nonfinite=skip`` such a step is left out and counted, and ``nonfinite_limit`` of them in a row
            end the run; with ``nonfinite=stop`` the first does.

    Attributes:
        skipped: steps left out in the whole run.
        in_a_row: of these, the last ones without an admitted step between them.
    """

    def __init__(self, recipe: TrainRecipe):
        self._limit = recipe.nonfinite_limit if recipe.nonfinite == "skip" else 1
        self.skipped = self.in_a_row = 0

    def admits(self, step: int, loss: float, grad_norm: float, is_scaled: bool = False) -> bool:
        """Whether the optimiser may take `step`; all processes must ask with the same numbers.

        Args:
            is_scaled: a loss scaler is at work, as under fp16. An infinite norm is its daily business: it leaves such a
                step out by itself and lowers the scale.

        Raises:
            RunError: the limit is reached.
        """
        if math.isfinite(loss) and (math.isfinite(grad_norm) or is_scaled):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self._limit:
            row = f" (as in {self.in_a_row} steps in a row)" if self.in_a_row > 1 else ""
            raise RunError(explain_nonfinite(step, loss, grad_norm) + row)
        return False

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
