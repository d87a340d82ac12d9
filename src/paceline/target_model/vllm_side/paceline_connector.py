"""vLLM's connector: a document's states go from the engine's cache into the memory of the target worker that asked.

A request says with ``kv_transfer_params`` where: ``{"document", "ticket", "first_token"}``. Its states are gathered
once the request has ended by itself, when its blocks hold all of its tokens, however many steps and attempts that
took; an aborted request writes nothing and is marked.

Shape letters: T tokens of a document, N states a token, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from paceline_memory import SharedStates
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.v1.request import RequestStatus

ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Document:
    """A document whose states are complete in the cache."""

    request: str
    place: dict[str, int]
    num_tokens: int
    blocks: list[int]


@dataclass
class Documents(KVConnectorMetadata):
    """What the scheduler tells the engine's workers in a step."""

    complete: list[Document] = field(default_factory=list)


@dataclass(eq=False)
class Copy:
    """States on their way out of the engine's device."""

    document: Document
    states: Tensor
    copied: Any

    def arrived(self) -> bool:
        """Whether they are on the host."""
        return self.copied is None or self.copied.query()


class PacelineConnector(ExampleHiddenStatesConnector):
    """vLLM's own connector finds the states in the cache; this one hands them on through shared memory."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._memory = SharedStates(extra("memory", ""))
        self._dtype = getattr(torch, extra("dtype", ""))
        self._complete: list[Document] = []
        self._copies: list[Copy] = []

    # Of the scheduler

    def build_connector_meta(self, scheduler_output: Any) -> Documents:
        """Called in every step: what has been completed since the last."""
        self._memory.progress += 1
        complete, self._complete = self._complete, []
        return Documents(complete)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be kept until the states have been gathered."""
        place = (request.kv_transfer_params or {}).get("paceline")
        if place is None:
            return False, None
        whole = request.status in ENDED and request.num_computed_tokens >= request.num_prompt_tokens
        if not whole:
            self._memory.marks[place["document"]] = -place["ticket"]
            return False, None
        self._complete.append(Document(request.request_id, place, request.num_prompt_tokens, list(block_ids)))
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, where the cache has several groups of blocks; none for what was never scheduled."""
        group = self._cache_kv_group_id
        return self.request_finished(request, block_ids[group] if group < len(block_ids) else [])

    # Of the engine's workers

    def wait_for_save(self) -> None:
        """Nothing: states are gathered when their request has ended."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed; called in every step."""
        if not self._is_tp_rank_zero:
            return None, None
        if self.has_connector_metadata():
            self._copies += [self._begin_copy(document) for document in self._get_connector_metadata().complete]
        arrived = [copy for copy in self._copies if copy.arrived()]
        self._copies = [copy for copy in self._copies if copy not in arrived]
        for copy in arrived:
            place, shape = copy.document.place, tuple(copy.states.shape)
            first = place["first_token"] * shape[1] * shape[2]
            self._memory.states(first, shape, self._dtype).copy_(copy.states)
            self._memory.marks[place["document"]] = place["ticket"]
        return {copy.document.request for copy in arrived} or None, None

    def _begin_copy(self, document: Document) -> Copy:
        assert self._kv_cache is not None, "caches are registered before the first step"
        size = self._block_size
        blocks = torch.tensor(document.blocks, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[: document.num_tokens]
        states = extract_from_kv_cache(self._kv_cache, slots.to(self._kv_cache.device), document.num_tokens)
        if states.dtype != self._dtype or len(slots) != document.num_tokens:
            raise RuntimeError(
                f"paceline: the engine has {len(slots)} of {document.num_tokens} states of {states.dtype}, asked for "
                f"{self._dtype}"
            )
        if not states.is_cuda:
            return Copy(document, states, None)
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        host.copy_(states, non_blocking=True)
        stream = torch.cuda.current_stream(states.device)
        return Copy(document, host, stream.record_event())
