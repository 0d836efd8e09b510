"""What clients may send: the fields of vLLM's GenerateRequest and SamplingParams."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field

from baton.errors import InvalidRequest
from baton.priority import MAX_PRIORITY, MIN_PRIORITY
from baton.sampling import MAX_CACHE_SALT_CHARS
from router.http.fields import CONFIG, Name, Whole, between
from router.http.sampling_fields import SamplingFields, check_logprob_token_ids, with_num_logprobs
from router.http.schemas import StreamOptions
from router.http.tokens.unsupported import IN_SAMPLING, IN_TOKENS
from router.http.unsupported import refuse_unsupported
from router.request_ids import REQUEST_ID
from router.text.generation_request import GenerationRequest
from router.text.models import ServedModel
from router.text.num_logprobs import ALL, STREAMED, WHOLE


class TokenSampling(SamplingFields):
    logprobs: Whole | None = between(ALL)
    detokenize: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_SAMPLING)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("`logprob_token_ids` needs `logprobs`.", "logprob_token_ids")

    @property
    def num_top(self) -> int | None:
        """See TokensShape."""
        if self.logprobs is None:
            return None
        return len(self.logprob_token_ids) + 1 if self.logprob_token_ids else max(1, self.logprobs)


_DEFAULTS = TokenSampling()


class TokensRequest(BaseModel):
    model_config = CONFIG
    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = Field(None, pattern=f"^{REQUEST_ID}$")
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    priority: Whole | None = between(MIN_PRIORITY, MAX_PRIORITY)
    timeout: float | None = Field(None, description="seconds until the request is given up")

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_TOKENS)
        self.sampling.check()
        if self.stream_options and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", "stream_options")

    def with_num_logprobs(self, model: ServedModel) -> Self:
        """See `router.http.sampling_fields`. Raises InvalidRequest."""
        check_logprob_token_ids(self.sampling.logprob_token_ids, model, "sampling_params.logprob_token_ids")
        said = with_num_logprobs(self.sampling, model, "logprobs", "prompt_logprobs")
        return self if said is self.sampling else self.model_copy(update={"sampling_params": said})

    @property
    def sampling(self) -> TokenSampling:
        return self.sampling_params or _DEFAULTS

    def constraint(self) -> str | None:
        """The field that says what answers must match."""
        return "structured_outputs" if self.sampling.structured_outputs else None

    def wanted(self, request_id: str) -> GenerationRequest:
        said = self.sampling
        return GenerationRequest(
            request_id=request_id,
            prompts=(tuple(self.token_ids),),
            n=1 if said.n is None else said.n,
            sampling=said.sampling(num_logprobs=said.logprobs, num_prompt_logprobs=said.prompt_logprobs),
            stop=said.stop,
            bad_words=said.bad_words,
            include_stop_str_in_output=bool(said.include_stop_str_in_output),
            skip_special_tokens=said.skip_special_tokens is not False,
            spaces_between_special_tokens=said.spaces_between_special_tokens is not False,
            logprob_limits=STREAMED if self.stream else WHOLE,
            timeout_s=self.timeout,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
        )
