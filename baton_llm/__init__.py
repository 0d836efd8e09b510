"""baton as a library: prompts in, answers out, without a server.

    from baton_llm import LLM, SamplingParams

    with LLM("baton-tiny") as llm:
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

`LLM` runs a prefill engine, a decode engine and a router in this process (`local`), or asks a running router
(`remote`). Names are vLLM's. At the top of all packages: nothing imports it. torch is imported only with the engines.
"""

from baton.errors import BatonError, InvalidRequest, RequestCancelled
from baton_llm.async_llm import AsyncLLM
from baton_llm.beam_search import BeamSearchParams
from baton_llm.errors import PromptsFailed
from baton_llm.llm import LLM
from baton_llm.outputs import CompletionOutput, Logprob, RequestOutput
from baton_llm.prompts import TextPrompt, TokensPrompt
from baton_llm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "BeamSearchParams",
    "StructuredOutputsParams",
    "RequestOutputKind",
    "TextPrompt",
    "TokensPrompt",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "BatonError",
    "InvalidRequest",
    "PromptsFailed",
    "RequestCancelled",
]
