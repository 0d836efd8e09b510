"""Sequence parallelism: a prompt's rows between the products of a divided model, each summed and normed by one rank.

    o or down, of a piece of the rows:  a partial sum of each row, on each rank
    send                                each rank's parts of a row to the row's owner     (copied)
    the owner                           sums, adds the residual, norms
    take                                normed rows to all ranks                          (copied)
    q, k, v or gate, up, of the piece   on each rank, in its turn

Copy engines carry rows, so while those of one piece travel, another piece is computed on all SMs. In place of an
all-reduce of all rows and a norm of all rows on each rank, the same bytes travel, and a rank norms 1 / size of the
rows. After Megatron-LM's sequence parallelism (Korthikanti et al. 2022); the pieces, as in the pipelined all-gathers of
torch's symmetric memory.

Why no rank overwrites what another has not read, or a flag that is still set. A rank's work is queued in order, and it
copies in order:

- `received` of a piece: a rank sends the parts of the next sum after it took the piece's rows from their owner, who had
  summed what was received before.
- rows in `x`: an owner norms those of the next sum after all ranks sent their parts of it, which they computed from
  these rows.
- `part`: a rank keeps it until it takes the piece's rows, of which owners had received all parts.
- the flags of parts: a rank clears them when it takes the piece. Another may have sent those of the next sum by then,
  but not of the one after that, for which it needs parts of the next: two sums have flags of their own, in turn.
- the flags of rows: like the rows. Therefore each rank owns rows of each piece, whose parts it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton_kernels.reduce_rms_norm import Parts, wait_for_flags

MIN_OWN_ROWS = 512
"""Steps in which each rank would own fewer rows are summed faster in other ways."""
MOST_PIECES = 8
"""Rows are divided into at most so many pieces, and not more than ranks: the more ranks, the longer rows travel."""
CAPTURED_PIECE_ROWS, PIECE_ROWS = 640, 2048
"""More than two pieces have at least so many rows, in CUDA graphs and in steps that are launched op by op. Products of
fewer rows use a GPU less well; and a host needs time for each piece."""
LAUNCHED_BYTES = 48 * 1024 * 1024
"""Steps that are launched op by op are divided if their rows have so many bytes. A host needs 0.4 to 0.7 ms more for
each piece of a layer, so for less work it would be slower than the GPUs."""
TILE_ROWS = 128
"""The rows of a tile in a large product."""
_ROWS = 2
"""Of flags: 0 and 1 are those of parts."""

OwnRows = Callable[[Parts, slice, Tensor], None]
"""Sums and norms this rank's own rows. Takes their parts, which of the step's rows they are, and where to write them,
[num_rows, width]."""


class RowMemory(NamedTuple):
    """A rank's memory, which all ranks map. x: [max_rows, width], the rows to compute with. received: [size - 1, ...,
    width], parts of its own rows; first those of the next rank. flags: [3, MOST_PIECES, size - 1] int32, zeros at
    first."""

    x: Tensor
    received: Tensor
    flags: Tensor

    @staticmethod
    def shapes(size: int, max_rows: int, width: int) -> tuple[tuple[int, ...], ...]:
        """Those of the fields."""
        own_rows = -(-max_rows // size) + MOST_PIECES
        return (max_rows, width), (size - 1, own_rows, width), (_ROWS + 1, MOST_PIECES, size - 1)


class Copy(NamedTuple):
    """A copy of memory. to, source: addresses, as this rank maps them."""

    to: int
    source: int
    num_bytes: int


class CopyQueue(Protocol):
    """Copies beside the current stream, in order."""

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured, so that the host need not start copies again."""

    def start(self, copies: Iterable[Copy]) -> None:
        """Copy once the current stream has reached this point. The caller keeps the memory until it has been
        copied."""

    def join(self) -> None:
        """Make the current stream wait for all copies."""


class SequenceParallel:
    """The rows of a step, divided among ranks; one step at a time. All ranks must make the same calls, with as many
    rows. memories: of all ranks. min_own_rows: see the constant. piece_rows: CAPTURED_PIECE_ROWS and PIECE_ROWS.

    active: whether the current step's rows are divided: from `begin` to `end`. A step must have an even number of sums.
    x: [1, num_rows, width], the step's rows; those of a piece, when it has been taken. pieces: the rows of each.
    most_pieces, launched_bytes: see the constants; between steps they may be changed, on all ranks.
    """

    active: bool
    x: Tensor
    pieces: list[slice]
    most_pieces: int
    launched_bytes = LAUNCHED_BYTES

    def __init__(
        self,
        rank: int,
        memories: Sequence[RowMemory],
        copies: CopyQueue,
        min_own_rows: int = MIN_OWN_ROWS,
        piece_rows: tuple[int, int] = (CAPTURED_PIECE_ROWS, PIECE_ROWS),
    ) -> None:
        self._rank, self._memories, self._copies = rank, memories, copies
        self._piece_rows, self.most_pieces = piece_rows, min(MOST_PIECES, len(memories))
        self._size, self._own = len(memories), memories[rank]
        self._min_rows = max(1, min_own_rows) * self._size
        self._set = torch.ones_like(self._own.flags[0, 0, 0])
        self.active, self.pieces = False, []

    def takes(self, num_rows: int) -> bool:
        """Whether a step of so many rows is divided."""
        if not self._copies.is_captured and self._own.x[:num_rows].nbytes < self.launched_bytes:
            return False
        return self._min_rows <= num_rows <= len(self._own.x)

    def begin(self, num_rows: int) -> None:
        """Begin a step, of rows that `takes` accepts."""
        captured, launched = self._piece_rows
        number = min(self.most_pieces, max(2, num_rows // (captured if self._copies.is_captured else launched)))
        length = max(self._size, -(-num_rows // (number * TILE_ROWS)) * TILE_ROWS)
        self.x, self.active = self._own.x[:num_rows][None], True
        self._pieces: list[_Piece] = []
        first = place = 0
        while first < num_rows:
            end = first + length
            rows = slice(first, num_rows if end + self._size > num_rows else end)
            self._pieces.append(self._piece(len(self._pieces), rows, place))
            first, place = rows.stop, place + -(-(rows.stop - first) // self._size)
        self.pieces = [piece.rows for piece in self._pieces]
        self._turn = 1

    def then(self, own_rows: OwnRows) -> None:
        """A new sum begins. own_rows: what owners make of the parts that are sent from now on."""
        self._turn, self._own_rows = 1 - self._turn, own_rows

    def send(self, index: int, part: Tensor) -> None:
        """Send this rank's partial sums of a piece's rows to their owners. part: [..., width], contiguous; must not
        change until the piece is taken."""
        assert part.is_contiguous()
        piece, address = self._pieces[index], part.data_ptr()
        piece.sent, piece.is_normed = _Sent(part.view(-1, part.shape[-1]), self._own_rows, self._turn), False
        parts = [copy._replace(source=address + copy.source) for copy in piece.send_parts]
        self._copies.start(parts + piece.set_flags[self._turn])
        if index:
            self._norm(index - 1)  # its parts travelled while this piece was computed

    def take(self, index: int) -> Tensor:
        """The rows that owners made of a piece's parts, [1, rows, width]. They are valid until the piece is sent
        again."""
        for each in range(index, min(index + 2, len(self._pieces))):
            self._norm(each)  # the next piece's rows travel while this one is computed
        piece = self._pieces[index]
        assert piece.sent is not None
        wait_for_flags(piece.flags[piece.sent.turn], piece.flags[_ROWS])
        piece.sent = None
        if all(each.sent is None for each in self._pieces):
            self._copies.join()  # nothing travels: a CUDA graph may end here
        return piece.x

    def take_all(self) -> Tensor:
        """Take all pieces. Returns `x`."""
        for index in range(len(self.pieces)):
            self.take(index)
        return self.x

    def end(self) -> Tensor:
        """Take all pieces, and end the step. Returns a copy of `x`."""
        rows = self.take_all().clone()
        self.active = False
        return rows

    def _norm(self, index: int) -> None:
        """Sum and norm this rank's own rows of a piece, and send them to the others, unless that is done."""
        piece = self._pieces[index]
        sent = piece.sent
        if sent is None or piece.is_normed:
            return
        piece.is_normed = True
        parts = Parts(sent.part[piece.of_part], piece.received, piece.flags[sent.turn], self._rank)
        sent.own_rows(parts, piece.own, piece.own_x)
        self._copies.start(piece.send_rows)

    def _piece(self, index: int, rows: slice, place: int) -> _Piece:
        """place: where in `received` this piece's parts begin."""
        length = rows.stop - rows.start
        ends = [length * rank // self._size for rank in range(self._size + 1)]
        of_part = slice(ends[self._rank], ends[self._rank + 1])
        own = slice(rows.start + of_part.start, rows.start + of_part.stop)
        own_x = self._own.x[own]
        piece = _Piece(
            rows=rows,
            x=self.x[:, rows],
            own=own,
            own_x=own_x,
            of_part=of_part,
            received=self._own.received[:, place : place + len(own_x)],
            flags=[of_kind[index] for of_kind in self._own.flags],
        )
        row_bytes = own_x.shape[1] * own_x.itemsize
        for away in range(1, self._size):
            to, sender = (self._rank + away) % self._size, self._size - away - 1
            memory, first, end = self._memories[to], ends[to], ends[to + 1]
            received = memory.received[sender, place].data_ptr()
            piece.send_parts.append(Copy(received, first * row_bytes, (end - first) * row_bytes))
            piece.send_rows.append(Copy(memory.x[own].data_ptr(), own_x.data_ptr(), own_x.nbytes))
            for kind, copies in enumerate(piece.set_flags):
                flag = memory.flags[kind, index, sender]
                copies.append(Copy(flag.data_ptr(), self._set.data_ptr(), self._set.nbytes))
        piece.send_rows.extend(piece.set_flags[_ROWS])
        return piece


class _Sent(NamedTuple):
    """Parts that were sent. turn: the kind of their flags."""

    part: Tensor
    own_rows: OwnRows
    turn: int


@dataclass(slots=True)
class _Piece:
    """A piece of the step's rows, and its rows in `x`.

    own, of_part: the rows that this rank owns, counted in the step and in the piece. own_x, received: where they, and
    the parts of them that others send, are. flags: that others set, by kind. send_parts: to the others; the source is
    counted from the part's address. send_rows: the own ones, and the flags after them. set_flags: those of the others,
    by kind. sent: from `send` to `take`.
    """

    rows: slice
    x: Tensor
    own: slice
    own_x: Tensor
    of_part: slice
    received: Tensor
    flags: list[Tensor]
    send_parts: list[Copy] = field(default_factory=list)
    send_rows: list[Copy] = field(default_factory=list)
    set_flags: list[list[Copy]] = field(default_factory=lambda: [[] for _ in range(_ROWS + 1)])
    sent: _Sent | None = None
    is_normed: bool = False
