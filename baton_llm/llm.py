"""`LLM`: prompts in, answers out, in one call."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from baton.errors import BatonError
from baton_llm.beam_search import BeamSearchParams
from baton_llm.errors import PromptsFailed
from baton_llm.host import Host, make_backend, result_of
from baton_llm.outputs import RequestOutput
from baton_llm.progress import Progress
from baton_llm.prompts import (
    Asked,
    ChatOptions,
    Conversation,
    Params,
    Prompt,
    params_of_each,
    priorities_of_each,
    read_conversations,
    read_prompts,
)
from baton_llm.sampling_params import SamplingParams, default_params


class LLM:
    """Answers prompts with a prefill engine and a decode engine in this process, or with a cluster.

    model: folder with a checkpoint, a hub id, baton-tiny (the default) or baton-tiny-moe, which come with baton; with a
    router, the name that it must serve. router: HOST:PORT of a router's gRPC API. api_key, ssl_ca_certs: for that
    router; the latter is a PEM file with the authorities to trust, without which there is no TLS. flags: settings of a
    node by name (`max_model_len=2048`); each is an environment variable too. torch's seed and number of threads are set
    for the whole process. All methods may be called from several threads.

    Raises TypeError for an unknown flag, ValueError for a bad one, and BatonError or OSError when the model cannot be
    loaded or the router cannot be reached.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        router: str | None = None,
        api_key: str | None = None,
        ssl_ca_certs: str | Path | None = None,
        **flags: Any,
    ) -> None:
        self._host = Host(make_backend(model, router, api_key, ssl_ca_certs, flags))
        self._host.close_with(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers to each prompt, in the order of the prompts.

        sampling_params: for all prompts, or a list with one for each; None leaves everything to the model's generation
        defaults, with answers as long as the context allows. priority: for all prompts, or a list with one for each; a
        lower one is served earlier, 0 is the default.

        All prompts are tokenized and checked before any runs: InvalidRequest, whose `param` names what is wrong, means
        that nothing was computed. A prompt that fails later does not affect the others: when all have ended, its error
        is raised, as PromptsFailed with the others' outputs if there were several prompts. That of a prompt which was
        not answered when the LLM was closed is RequestCancelled.
        """
        return self._run(read_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, which the model's chat template turns into prompts. A message
        is a dict in OpenAI's form. options: see ChatOptions."""
        return self._run(read_conversations(messages, options), sampling_params, use_tqdm, priority)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The best `params.beam_width` answers to each prompt, best first. `cumulative_logprob` of an answer is that of
        its beam. Raises as `generate`."""
        return self._run(read_prompts(prompts), params.sampling_params(), False, None)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it: `encode`, `decode`, `apply_chat_template` and so on. Raises
        NotImplementedError with a router, which has it."""
        return self._host.backend.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json states, and the defaults of `SamplingParams` for the rest: 16 for
        `max_tokens`, unless there is a `max_new_tokens`. Raises BatonError."""
        return default_params(result_of(self._host.submit(self._host.backend.defaults())))

    def close(self) -> None:
        """End all requests, threads and engines. Idempotent. Happens by itself when the LLM is collected, and at the
        end of the process."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Asked], params: Params, use_tqdm: bool, priority: int | Sequence[int] | None
    ) -> list[RequestOutput]:
        host, each = self._host, params_of_each(params, len(prompts))
        priorities = priorities_of_each(priority, len(prompts))
        encoded = result_of(host.submit(host.encode(prompts, each)))
        ended: queue.SimpleQueue[RequestOutput | BatonError | None] = queue.SimpleQueue()
        future = host.submit(host.answer_all(encoded, each, priorities, ended.put))
        future.add_done_callback(lambda _: ended.put(None))
        progress = Progress(len(prompts), use_tqdm)
        try:
            while (result := ended.get()) is not None:
                progress.step(result)
        except BaseException:  # Ctrl-C
            future.cancel()
            raise
        finally:
            progress.close()
        results = result_of(future)
        return _outputs(results)


def _outputs(results: Sequence[RequestOutput | BatonError]) -> list[RequestOutput]:
    """Raises the error of the only prompt, or PromptsFailed."""
    errors = {index: result for index, result in enumerate(results) if isinstance(result, BatonError)}
    outputs = [None if isinstance(result, BatonError) else result for result in results]
    if errors and len(results) == 1:
        raise errors[0]
    if errors:
        raise PromptsFailed(errors, outputs)
    return [output for output in outputs if output is not None]
