"""The part of a model that a rank holds."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedModel

from engine.model.errors import UnsupportedModel
from engine.model.experts import expert_modules
from engine.model.parallel.data_parallel import DataParallel
from engine.model.parallel.experts import FLAG
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.parallel.stages import WHOLE, Stage


class RankPart(NamedTuple):
    """The part of a stage's layers that a rank holds. Its group is all ranks of that stage. whole_experts: some experts
    as a whole, instead of a part of each; num_redundant_experts: not None if these change places, with so many more
    slots than experts. data: the rank's place among those of several nodes that divide experts; None: there is one
    node."""

    group: RankGroup = ONE_RANK
    stage: Stage = WHOLE
    whole_experts: bool = False
    num_redundant_experts: int | None = None
    data: DataParallel | None = None

    @property
    def experts(self) -> DataParallel:
        """The ranks that divide blocks of experts."""
        return self.data or DataParallel(self.group)

    @property
    def cuts_weights(self) -> bool:
        return self.experts.everyone.size > 1

    @property
    def is_divided(self) -> bool:
        return self.cuts_weights or self.stage.size > 1

    def require_possible(self, model: PreTrainedModel) -> None:
        """Check that the model can be divided so. model: the whole model, without weights. Raises UnsupportedModel if
        `whole_experts` is set and the model has no experts of a known form."""
        if self.whole_experts and not expert_modules(model):
            model_type = model.config.get_text_config().model_type
            raise UnsupportedModel(
                f"{FLAG}: {model_type} is not a mixture of experts, or its experts are not of a known form"
            )


WHOLE_MODEL = RankPart()
