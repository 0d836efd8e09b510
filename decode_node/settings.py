"""Settings of `baton-decode`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from node.settings import NodeSettings


class DecodeSettings(NodeSettings):
    """A decode node: takes over computed prompts and generates their tokens by continuous batching."""

    prog: ClassVar[str] = "baton-decode"

    num_outward_slots: ClassVar[int] = 4
    """For requests that move to another decode node: some parts are gathered while others are sent."""

    @model_validator(mode="after")
    def _check_stages(self) -> DecodeSettings:
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                "--pipeline-parallel-size: for prefill nodes only; on a decode node each token would wait for all of "
                "its stages"
            )
        return self
