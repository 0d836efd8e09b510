"""`--eplb-config`: the form of vLLM's EPLBConfig."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_FLAG = "--eplb-config"


class EplbConfig(BaseModel):
    """The JSON of `--eplb-config`: names and defaults of vLLM's EPLBConfig.

    window_size: steps whose load counts. step_interval: steps between two decisions. num_redundant_experts: slots of
    all ranks beyond one for each expert of a layer. log_balancedness: log every log_balancedness_interval steps how
    balanced the ranks were. use_async changes nothing: experts always move one layer at a time, between two steps.
    policy, communicator: only the defaults, DeepSeek's EPLB over the ranks' own group.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    window_size: int = Field(1000, ge=1)
    step_interval: int = Field(3000, ge=1)
    num_redundant_experts: int = Field(0, ge=0)
    log_balancedness: bool = False
    log_balancedness_interval: int = Field(1, ge=1)
    use_async: bool = False
    policy: Literal["default"] = "default"
    communicator: None = None

    @property
    def log_every(self) -> int:
        """Steps between two lines in the log; 0: there are none."""
        return self.log_balancedness_interval if self.log_balancedness else 0

    @classmethod
    def parse(cls, text: str) -> EplbConfig:
        """Raises ValueError, of one line."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{_FLAG}: {where + ': ' if where else ''}{first['msg']}") from None
