"""The CUDA engine: a rank is a GPU. This module is what the rank's host does between two kernels.

The host must do little, since an inference step of a model has hundreds of kernels. A layer's tensors and options are
checked and prepared once; later calls find the prepared layer by addresses, shapes, strides, types and devices. The
host waits for the device only for reports, for traces, and for the counts of rows that calls in a group keep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import _ffi, jit, nvshmem
from .. import placement as placements
from ..calls.arguments import check, check_tokens, redispatches
from ..calls.refusals import made
from ..calls.tensors import DeviceOperand, as_view, device_operand, refuse_unstored
from ..contexts.limits import ContextSpec, Room
from ..errors import GroupError, InvalidArgument
from ..report import CallReport, expert_load
from ..spec import ELEMENT_BYTES, ELEMENT_TYPES, FP8, MXFP4, LayerSpec, Options, bounded, scale_blocks
from ..spec.tensors import Tensors
from ..trace import CallTrace
from ..tuning.knobs import checked_profile, order_of, stored_profile
from ..tuning.profiles import Setting
from ..weights.scales import SCALE_OF
from . import cuda_training
from .base import Engine, Gradients, Membership
from .cuda_report import Ended, call_trace, counted, timed
from .pulse import beating

_MOST_LAYERS = 4096  # the most prepared layers that are kept; each takes a few kilobytes
_ALIGNMENT = 16  # bytes: rows begin at multiples of it, because copies move 16 bytes at a time
_VECTORS = ("gate_up_bias", "down_bias", "router_bias", "choice_bias")
_GRADIENTS = {
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "gate_up_bias": "gate_up_bias",
    "down_bias": "down_bias",
    "router": "router",
    "shared_gate_up": "shared_gate_up",
    "shared_down": "shared_down",
    "shared_up": "shared_up",
}
"""The gradients of a layer's tensors that a backward pass's kernel writes: the kernel's names, and those of
`flashmoe.moe`."""
_OF_TOKENS = ("x", "topk_weights")
"""Tensors whose gradients always replace the contents of their memory: `Gradients.accumulates` does not apply."""
_BAD_ROW = -3
"""The expert id that the kernel writes for all choices of a bad row (``Choice::kBad``)."""
_ABSENT = DeviceOperand(0, (), "", 0, 0)
_INFERENCE, _FORWARD, _BACKWARD = range(3)  # cuda::Pass
machines: tuple[int, ...] = ()
"""For tests: by rank, a number for the machine on which the ranks of a group pretend to be. Empty: all ranks are on one
machine, as they really are. If machines are given, calls have no gradients, and their rows and signals go as between
machines (docs/protocol.md), although through mapped memory."""
_DRIFT_SECONDS = 0.01  # between two readings of the clocks; longer than from most calls' ends to the first reading
_REACH = 32 << 30  # bytes that x may span: the kernel counts in 16-byte units, in 31 bits
_MOST_APART = 1 << 40  # bytes: strides of a tensor map are less
_UNKNOWN: Any = object()


@dataclass(frozen=True)
class Prepared:
    """A layer as the library knows it, and what Python needs for its calls."""

    number: int
    layer: LayerSpec
    owners: tuple[int, ...]
    """For each expert, the rank to which this rank sends the expert's tokens."""
    experts: tuple[int, ...]
    """The slices of experts that this rank holds."""
    x_bytes: int
    """Bytes of an element of x."""
    y_type: Any
    """PyTorch's type of y."""

    @property
    def local(self) -> int:
        """El, the number of experts that this rank holds; slices count as experts."""
        return len(self.experts)

    @property
    def choices(self) -> int:
        """The number of a token's choices, including the shared expert. For each, a call that keeps stores the expert
        and the weight."""
        return self.layer.choices + self.layer.shared_experts


class CudaEngine(Engine):
    """A rank on a GPU; a call returns once its kernel is launched."""

    def __init__(
        self, asked: ContextSpec, who: Membership, device: int | None, profile: Mapping[str, int] | None
    ) -> None:
        _check_quantised(asked.layer, asked.ranks, asked.transport)
        ordinal = -1 if device is None else bounded("device", device, 0, 2**15)
        self.profile, mode = _chosen_profile(asked, profile, ordinal)
        """The settings of the order of tasks that are not left to the built-in order."""
        made_for = asked
        free = asked.layer.return_mode == "auto" and asked.layer.slices == 1 and asked.transport != "rdma"
        if free and mode is not None:
            made_for = replace(asked, layer=replace(asked.layer, return_mode=mode))
        self.machines = machines if asked.ranks > 1 else ()
        self.spread = len(set(self.machines)) > 1
        """Whether the group's ranks pretend to be on several machines; see `machines`."""
        if self.spread and asked.transport == "rdma":
            raise InvalidArgument(f"machines: expected one with transport 'rdma', got {machines}")
        library = _ffi.library()
        nvshmem_path = ""
        if asked.ranks > 1:
            nvshmem.check_network()
            nvshmem_path = nvshmem.library()

        order = order_of(self.profile)

        def create(made_for: ContextSpec, name: str) -> Callable[[], int] | None:
            limits = made_for.limits()
            how = nvshmem_path, ordinal, who.timeout_ns, list(self.machines)
            return library.cuda_create(limits, order, who.rank, name, *how)

        owner = create(made_for, who.name)
        if owner is None and self.spread:
            raise GroupError(
                f"machines: expected mapped memory among all ranks with {machines}, got some that is not mapped"
            )
        if owner is None:  # on every rank, because some rank has not mapped some peer's memory
            made_for = replace(asked, transport="rdma")
            _check_quantised(made_for.layer, made_for.ranks, made_for.transport)
            owner = create(made_for, f"{who.name}-rdma")
        super().__init__(owner, library.cuda_close)
        self.room = Room.of(made_for, who.rank)
        self._timeout_ns = who.timeout_ns
        self.rdma = made_for.transport == "rdma"
        """Whether rows go to other ranks by NVSHMEM's puts."""
        described = library.cuda_describe(self._handle)
        self.device, self.processors, self.heap_bytes, self.workspace_bytes, self._tile_rows, self._features = described
        self.layers: dict[Any, Prepared | None] = {}
        """Layers of earlier calls, by `_key`. None stands for a layer whose shared expert's gate and up are two
        matrices at addresses from which the kernel cannot read both (`_in_one_map`). Each call of such a layer copies
        both into one matrix."""
        self._report: CallReport | None = None
        self._unread: tuple[Prepared, int] | None = None  # layer and T of the last call, if its report is unread
        self._unread_trace: tuple[Prepared, bool] | None = (
            None  # of the last recorded call; whether it is a backward pass
        )

    def call(self, tensors: Tensors, options: Options, trace: bool) -> Any:
        tensors, layer = self._layer(tensors, options, trace or self._recorded is not None, _INFERENCE)
        return self._call(tensors, layer, trace)

    def call_and_keep(self, tensors: Tensors, options: Options) -> tuple[Any, Any, Any]:
        """If the layer has no gradients on a GPU, the tensor of what is kept is empty."""
        import torch

        x, asked = tensors.x, tensors.router_logits
        alone = torch.empty(0, dtype=torch.int64)
        if cuda_training.missing(tensors, self.rdma, self.spread) is not None:
            return self.call(tensors, options, False), x.new_empty(0, dtype=torch.uint8), alone
        if self.room.ranks != 1:
            return self._call_and_keep_in_group(tensors, options)
        tensors = tensors._replace(router_logits=None)
        tensors, layer = self._layer(tensors, options, self._recorded is not None, _FORWARD)
        at = self._kept_routing(layer, x.shape[0], cuda_training.NO_ROOM)
        if at.bytes > cuda_training.MOST_KEPT:
            raise InvalidArgument(
                f"x: expected tokens whose gradients need at most {cuda_training.MOST_KEPT >> 30} GiB, got "
                f"{x.shape[0]} of {at.bytes / x.shape[0]:.0f} bytes each"
            )
        kept = x.new_empty(at.bytes, dtype=torch.uint8)
        logits = at.logits_in(kept, tensors)
        y = self._call(tensors._replace(router_logits=logits), layer, False, kept)
        if asked is not None:
            asked.copy_(logits)
        return y, kept, alone

    def _kept_routing(self, layer: Prepared, tokens: int, room: cuda_training.KeptRoom) -> cuda_training.KeptRouting:
        found = _ffi.library().cuda_kept_routing(self.checked_handle(), layer.number, tokens, room)
        return cuda_training.KeptRouting(*found)

    def _call_and_keep_in_group(self, tensors: Tensors, options: Options) -> tuple[Any, Any, Any]:
        """As `call_and_keep`, among several ranks.

        The call writes its rows to `memory`, which has room for the most rows that there may be. `kept` gets room for
        as many rows as earlier calls of the layer had, and a few more, so that the rows can be moved to `kept` before
        the host knows their number. While they move, the host waits for the device and reads the number. If the rows do
        not fit, as at a layer's first call, or if much less room would do, they are moved to a new `kept` of the right
        size.
        """
        import torch

        x, asked, library = tensors.x, tensors.router_logits, _ffi.library()
        handle, stream = self.checked_handle(), current_stream(self.device)
        tensors = tensors._replace(router_logits=None)
        tensors, layer = self._layer(tensors, options, self._recorded is not None, _FORWARD)
        memory = x.new_empty(library.cuda_call_bytes(handle, layer.number, stream), dtype=torch.uint8)
        of_call = handle, layer.number, stream, memory.data_ptr()
        room = cuda_training.KeptRoom(*library.cuda_expected_room(handle, layer.number))
        if (at := self._kept_routing(layer, x.shape[0], room)).bytes > cuda_training.MOST_KEPT:
            at = self._kept_routing(layer, x.shape[0], room := cuda_training.NO_ROOM)
        kept = x.new_empty(at.bytes, dtype=torch.uint8)
        routing, logits = at.own(kept), at.logits_in(kept, tensors)
        y = self._call(tensors._replace(router_logits=logits), layer, False, memory, routing)
        with made():
            library.cuda_count_rows(*of_call)
            library.cuda_move_rows(*of_call, kept.data_ptr(), room)
            if asked is not None:
                asked.copy_(logits)
            rows = cuda_training.KeptRows(*library.cuda_read_counts(handle, layer.number, room))
            if rows.room != room:
                if (at := self._kept_routing(layer, x.shape[0], rows.room)).bytes > cuda_training.MOST_KEPT:
                    raise InvalidArgument(
                        f"x: expected tokens whose gradients need at most {cuda_training.MOST_KEPT >> 30} GiB, got "
                        f"{rows.rows} rows of its experts, which need {at.bytes} bytes"
                    )
                routing = routing.clone()
                del kept, logits  # so that the new `kept` may get their memory
                kept = x.new_empty(at.bytes, dtype=torch.uint8)
                library.cuda_move_rows(*of_call, kept.data_ptr(), rows.room)
                at.own(kept).copy_(routing)
        return y, kept, torch.tensor(rows)

    def backward(self, kept: Any, counted: Any, options: Options, gradients: Gradients) -> None:
        given, wanted, accumulates = gradients
        tensors = Tensors(**{name: given.get(name) for name in Tensors._fields})._replace(router_logits=None)
        if (without := cuda_training.missing(tensors, self.rdma, self.spread)) is not None:
            raise NotImplementedError(
                f"flashmoe.moe: FlashMoE has no backward pass of {without} on a GPU; call the layer under "
                "torch.no_grad(), or detach its input and freeze its weights"
            )
        library, handle = _ffi.library(), self.checked_handle()
        tensors, layer = self._layer(tensors, options, self._recorded is not None, _BACKWARD)
        tokens, alone = tensors.x.shape[0], self.room.ranks == 1
        rows = cuda_training.ALONE if alone else cuda_training.KeptRows(*counted.tolist())
        if tokens == 0 and alone:
            for name, each in wanted.items():
                if not accumulates or name in _OF_TOKENS:
                    each.zero_()
            return
        dy = given["y"] if given["y"].data_ptr() % _ALIGNMENT == 0 else given["y"].clone()
        at = self._kept_routing(layer, tokens, rows.room)
        ids, weights = at.choices(kept, tokens, layer.choices)
        address, row_bytes = self._rows(tensors.x, layer)
        dx, of_weights = wanted.get("x"), wanted.get("topk_weights")  # the kernel writes to these tensors if it can
        if dx is None or not dx.is_contiguous():
            dx = dy.new_empty(dy.shape)
        # A rank alone adds here what `down_bias` contributes to the gradients of combine weights. Among several ranks,
        # a rank has only its own experts' biases, so each rank's kernel adds the part of its own experts.
        alone_on_output = alone and not options.weights_on_input
        by_bias, logit_gradients = cuda_training.weights_by_bias(tensors, given, ids) if alone_on_output else None, None
        if tensors.router is not None:
            # Even without tokens this memory is not empty: its address tells the kernel that there is a router.
            logit_gradients = dy.new_empty(max(tokens, 1), library.cuda_logit_pitch(layer.layer.experts))
        elif of_weights is not None and (of_weights.dtype != weights.dtype or not of_weights.is_contiguous()):
            of_weights = weights.new_empty(of_weights.shape)
        of_shared = weights.new_empty(tokens) if "shared_gate" in wanted else None
        memory = kept.new_empty(library.cuda_pass_bytes(handle, layer.number, tokens, rows.rows, rows.received))
        written = _written(wanted, "shared_up" in given)
        self._read_recorded()
        library.cuda_backward(
            handle,
            layer.number,
            current_stream(self.device),
            tokens,
            dy.data_ptr(),
            dx.data_ptr(),
            {
                "kept": kept.data_ptr(),
                **rows._asdict(),
                "x": address,
                "x_row_bytes": row_bytes,
                "memory": memory.data_ptr(),
                "weights": _place(of_weights),
                "given_logit_gradients": _place(given.get("router_logits")),
                "weights_by_bias": _place(by_bias),
                "accumulates": int(accumulates),
                "logit_gradients": _place(logit_gradients),
                "shared_logits": _place(of_shared),
            }
            | {name: written[place].data_ptr() if place in written else 0 for name, place in _GRADIENTS.items()},
        )
        with made():
            if self._recorded is not None:
                self._unread_trace = layer, True
            for place in _GRADIENTS.values():
                if place in wanted and written[place] is not wanted[place]:
                    wanted[place].copy_(written[place])
            if of_weights is not None and by_bias is not None:
                of_weights = of_weights + by_bias
            for place, found in (("x", dx), ("topk_weights", of_weights)):
                if place in wanted and found is not wanted[place]:
                    wanted[place].copy_(found)
            if of_shared is not None:
                cuda_training.gate_gradient(of_shared, tensors.x, wanted["shared_gate"], accumulates)
            if "router_bias" in wanted:
                experts = layer.layer.experts
                cuda_training.bias_gradient(logit_gradients[:tokens, :experts], wanted["router_bias"], accumulates)

    def _layer(self, tensors: Tensors, options: Options, trace: bool, pass_: int) -> tuple[Tensors, Prepared]:
        """The tensors with which to make the call, and its layer, known from an earlier call or prepared now. The
        tensors are the given ones, but a shared expert's gate and up may have been copied into one matrix."""
        self.checked_handle()
        key = _key(tensors, options, trace, pass_)
        try:
            layer = self.layers.get(key, _UNKNOWN)
        except TypeError:  # an option has no hash: `check` says what is wrong
            key, layer = None, _UNKNOWN
        if layer is _UNKNOWN:
            layer = self._prepare(tensors, options, trace, pass_)
            if key is not None:
                self._remember(key, layer)
        if layer is not None:
            check_tokens(self.room, options, tensors.x.shape[0])  # T is not in the key
            return tensors, layer
        import torch

        both = torch.cat([tensors.shared_gate_up.detach(), tensors.shared_up.detach()])
        return self._layer(tensors._replace(shared_gate_up=both, shared_up=None), options, trace, pass_)

    def _call(self, tensors: Tensors, layer: Prepared, trace: bool, kept: Any = None, routing: Any = None) -> Any:
        """Makes a call, and returns its result. `kept`: memory for what gradients need; None: the call keeps nothing.
        `routing`: among several ranks, memory for the routing that the call keeps."""
        import torch

        handle = self.checked_handle()
        x = tensors.x
        tokens = x.shape[0]
        address, row_bytes = self._rows(x, layer)
        experts, top_k = layer.layer.experts, layer.layer.top_k
        ids = _address("topk_ids", tensors.topk_ids, T=tokens, K=top_k)
        weights = _address("topk_weights", tensors.topk_weights, T=tokens, K=top_k)
        load = _address("load", tensors.load, E=experts)
        logits = _address("router_logits", tensors.router_logits, T=tokens, E=experts)
        scale = _address("x_scale", tensors.x_scale, T=tokens, blocks=scale_blocks(layer.layer.hidden))
        out = torch.empty_like(x, dtype=layer.y_type, memory_format=torch.contiguous_format, requires_grad=False)
        stream = current_stream(self.device)
        self._read_recorded()
        _ffi.library().cuda_call(
            handle,
            layer.number,
            stream,
            tokens,
            address,
            row_bytes,
            scale,
            out.data_ptr(),
            ids,
            weights,
            load,
            logits,
            _place(kept),
            _place(routing),
        )
        self._unread = layer, tokens
        if self._recorded is not None and (tokens != 0 or self.room.ranks != 1):
            self._unread_trace = layer, False
        elif trace:
            with made():
                self._report = self._traced(self.last_call(), layer)
        return out

    def refuse(self, reason: str) -> None:
        """Does nothing while a graph is captured, and if ranks reach one another by puts alone: then the other ranks
        wait for the next call that this rank makes."""
        if not self.closed and os.getpid() == self._process:
            _ffi.library().cuda_refuse(self._handle, reason, current_stream(self.device))

    def last_call(self) -> CallReport | None:
        if self._unread is not None:
            self._report = self._counted(*self._unread)
            self._unread = None
        return self._report

    def record(self, call: Callable[[], Any]) -> list[CallTrace]:
        self._unread_trace = None
        return super().record(call)

    def _read_recorded(self) -> None:
        """Waits for the last call, and reads its trace before another call overwrites it. Then reads the host's and the
        device's clocks twice, `_DRIFT_SECONDS` apart, to convert the trace's times."""
        if self._recorded is None or self._unread_trace is None:
            return
        (layer, backward), self._unread_trace = self._unread_trace, None
        self.synchronize()
        trace = self._read_trace(layer, backward)
        read = partial(_ffi.library().cuda_read_clock, self.checked_handle(), layer.number, current_stream(self.device))
        host, device, error = read()
        time.sleep(_DRIFT_SECONDS)
        later_host, later_device, later_error = read()
        drift = abs(later_host - later_device - (host - device))
        error = max(error, later_error) + drift
        self._recorded.append(replace(trace, offset_ns=host - device, error_ns=error))

    def synchronize(self) -> None:
        _ffi.library().cuda_synchronize(self.checked_handle(), current_stream(self.device))

    def _remember(self, key: Any, layer: Prepared | None) -> None:
        if len(self.layers) >= _MOST_LAYERS:
            oldest = self.layers.pop(next(iter(self.layers)))
            if oldest is not None:
                _ffi.library().cuda_remove_layer(self.checked_handle(), oldest.number)
        self.layers[key] = layer

    def _prepare(self, tensors: Tensors, options: Options, trace: bool, pass_: int) -> Prepared | None:
        """Checks everything that `_key` looks at, and adds the layer to the library. Returns what `layers` gets."""
        args = check(self.room, partial(device_operand, device=self.device), tensors, options)
        layer = args.layer
        _check_quantised(layer, self.room.ranks, "auto")
        each = _ALIGNMENT if layer.quantised else _ALIGNMENT // 2
        for name, symbol, value in (("x", "H", layer.hidden), ("down_proj", "I", layer.intermediate)):
            if value % each:
                raise InvalidArgument(
                    f"{name}: expected {symbol} a multiple of {each} (16-byte rows for the copy engine), got {value}"
                )
        if layer.transposed and layer.weight_type not in jit.TRANSPOSED:
            raise InvalidArgument(
                f"transposed: expected {' or '.join(jit.TRANSPOSED)} weights with it on the CUDA engine, got "
                f"{layer.weight_type}"
            )
        addresses = _addresses(args.operands)
        if not _in_one_map(args.operands):
            return None
        library, described = _ffi.library(), layer.to_map()
        handle = self.checked_handle()
        general, few, group = library.cuda_kernels_of(handle, described, pass_)
        build: dict[str, Any] = {
            "dtype": layer.y_type,
            "activation": layer.activation,
            "trace": bool(trace),
            "exact": layer.exact and layer.x_type == "float32",
            "rdma": self.rdma,
            "transposed": layer.transposed,
            "quantised": layer.quantised,
            "mxfp4": layer.weight_type == MXFP4,
            "keeps": pass_ == _FORWARD,
            "backward": pass_ == _BACKWARD,
            "group": bool(group),
            "on_input": pass_ != _INFERENCE and layer.weights_on_input,
            "sliced": pass_ != _INFERENCE and (layer.shared != 0 or layer.slices != 1),
            "machines": self.spread,
        }
        needed = [is_few for is_few, needs in ((False, general), (True, few)) if needs]
        found = self._kernels([jit.Variant(**build, few=is_few) for is_few in needed])
        cubins = dict(zip(needed, map(str, found), strict=True))
        number = library.cuda_add_layer(
            handle,
            described,
            placements.flat(args.placement),
            addresses,
            cubins.get(False, ""),
            cubins.get(True, ""),
            bool(trace),
            pass_,
            pass_ != _INFERENCE and redispatches(self.room, options),
            bool(options.strict),
            current_stream(self.device),
        )
        rank = self.room.rank
        owners = placements.owners(args.placement, rank)
        experts = tuple(placements.local_experts(args.placement, rank))
        import torch

        return Prepared(number, layer, owners, experts, ELEMENT_BYTES[layer.x_type], getattr(torch, layer.y_type))

    def _kernels(self, variants: list[jit.Variant]) -> list[Path]:
        """The cubins of these kernels, compiled if necessary. While they are compiled, this rank's progress word keeps
        changing, so that the waits of other ranks do not expire."""
        if self.room.ranks == 1 or self.rdma:  # with puts, other ranks cannot see this rank's progress
            return jit.kernels(variants)
        with beating(partial(_ffi.library().cuda_beat, self.checked_handle()), self._timeout_ns):
            return jit.kernels(variants)

    def _rows(self, x: Any, layer: Prepared) -> tuple[int, int]:
        """The address of x's first row, and the bytes from one row to the next. Type, width and device of x have been
        checked before."""
        address = x.data_ptr()
        stride, step = x.stride()
        row_bytes = stride * layer.x_bytes
        end = (x.storage_offset() + layer.layer.hidden) * layer.x_bytes + (x.shape[0] - 1) * row_bytes
        if x.untyped_storage().nbytes() < end:
            refuse_unstored("x", x)  # an x without rows needs no bytes
        if step != 1 or (address | row_bytes) % _ALIGNMENT:  # raises, unless x has one row or none
            operand = _aligned("x", device_operand("x", x, "", ELEMENT_TYPES, self.device))
            address, row_bytes = operand.address, operand.row_bytes
        if row_bytes * x.shape[0] >= _REACH:
            raise InvalidArgument(
                f"x: expected rows within {_REACH >> 30} GiB, got {x.shape[0]} rows {row_bytes} bytes apart"
            )
        return address, row_bytes

    def _counted(self, prepared: Prepared, tokens: int) -> CallReport:
        """The report of the last call, without times. Waits for the call, reads its routing and how many rows other
        ranks have sent here, and computes the report from these."""
        self.synchronize()
        layer, room = prepared.layer, self.room
        shared = layer.shared_experts
        ids = np.empty((tokens, layer.choices), np.int32)
        weights = np.empty((tokens, layer.choices), np.float32)
        library, handle = _ffi.library(), self.checked_handle()
        library.cuda_read_routing(handle, as_view(ids), as_view(weights))
        bad_rows = int((ids[:, 0] == _BAD_ROW).sum())
        if room.ranks == 1:
            load, returned, passed_on = expert_load([ids], layer.experts), 0, 0
        else:
            received = np.zeros((room.ranks, prepared.local), np.int32)
            returned, passed_on = library.cuda_read_received(handle, prepared.number, as_view(received))
            load = received.sum(axis=0)
        ended = Ended(
            layer=layer,
            owners=prepared.owners,
            rank=room.rank,
            ranks=room.ranks,
            processors=self.processors,
            topk_ids=ids,
            topk_weights=weights,
            bad_rows=bad_rows,
            load=np.append(load, [tokens - bad_rows] * shared),
            returned=returned,
            passed_on=passed_on,
            machines=self.machines or (0,) * room.ranks,
            block_tokens=library.cuda_token_block(handle, tokens, layer.parts + shared, layer.choices + shared),
            tile_rows=self._tile_rows,
            task_features=self._features,
        )
        return counted(ended)

    def _traced(self, untimed: CallReport, layer: Prepared) -> CallReport:
        """`untimed`, with times from the trace of that call, which is over."""
        if untimed.tokens == 0 and self.room.ranks == 1:
            return untimed
        return timed(untimed, self._read_trace(layer, False))

    def _read_trace(self, layer: Prepared, backward: bool) -> CallTrace:
        """The trace of the last call, which is over and was traced."""
        library, handle, spec = _ffi.library(), self.checked_handle(), layer.layer
        raw = np.empty(library.cuda_trace_bytes(handle), np.uint8)
        library.cuda_read_trace(handle, as_view(raw))
        experts = [expert // spec.slices for expert in layer.experts] + [spec.experts]
        return call_trace(raw, self.processors, self.room.rank, backward, experts)


def current_stream(device: int) -> int:
    """PyTorch's current stream of the device, as the driver's handle."""
    import torch

    return torch._C._cuda_getCurrentRawStream(device)  # not torch.cuda.current_stream, which makes an object


def _check_quantised(layer: LayerSpec, ranks: int, transport: str) -> None:
    """Raises `InvalidArgument` for combinations with quantised weights for which there is no kernel: y of a type that
    `jit.BESIDE_QUANTISED` does not have, FP8 with puts, and MXFP4 with several ranks. (The library checks that calls
    with MXFP4 have few tokens.)"""
    if layer.weight_type == MXFP4 and ranks > 1:
        raise InvalidArgument(f"CUDA engine: ranks: expected 1 with weights of {MXFP4}, got {ranks}")
    if layer.weight_type == MXFP4 and layer.y_type not in jit.BESIDE_QUANTISED:
        raise InvalidArgument(
            f"CUDA engine: x: expected {', '.join(jit.BESIDE_QUANTISED)} with weights of {MXFP4}, got {layer.y_type}"
        )
    if layer.quantised and transport == "rdma":
        raise InvalidArgument(
            f"CUDA engine: transport: expected mapped memory with weights of {FP8}, got {transport!r}"
        )
    if layer.quantised and layer.y_type not in jit.BESIDE_QUANTISED:
        types = ", ".join(jit.BESIDE_QUANTISED)
        raise InvalidArgument(f"CUDA engine: x: expected {types} or {FP8} with weights of {FP8}, got {layer.y_type}")


def _place(tensor: Any) -> int:
    """The tensor's address; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def _chosen_profile(
    asked: ContextSpec, given: Mapping[str, int] | None, ordinal: int
) -> tuple[dict[str, int], str | None]:
    """The given profile, without a return mode; else the profile and the return mode that are stored for contexts like
    this one."""
    if given is not None:
        return checked_profile(given), None
    layer = asked.layer
    if layer.encoding is not None:  # quantised layers are not measured
        return {}, None
    setting = Setting(
        device=_ffi.library().cuda_device_name(ordinal),
        ranks=asked.ranks,
        dtype=layer.x_type,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        top_k=layer.top_k,
        tokens=asked.max_tokens,
    )
    return stored_profile(setting)


def _key(tensors: Tensors, options: Options, trace: bool, pass_: int) -> Any:
    """A key that is equal for calls that differ only in their tokens: in T, and in the values and addresses of tensors
    that come with tokens. None if an argument is no tensor with an address; the checks refuse it. The key includes
    where a weight's storage ends, because the checks depend on it."""
    x, ids, weights = tensors.x, tensors.topk_ids, tensors.topk_weights
    try:
        parts = [
            (
                (storage := each.untyped_storage()).data_ptr(),
                storage.nbytes(),
                each.storage_offset(),
                each.shape,
                each.stride(),
                each.dtype,
                each.device,
            )
            if each is not None
            else None
            for each in tensors.of_layer
        ]
        parts += (x.shape[1:], x.dtype, x.device, x.layout)
        if ids is not None:
            parts += (ids.shape[1:], ids.dtype, ids.device, ids.layout, weights.dtype, weights.device, weights.layout)
        scale = tensors.x_scale
        if scale is not None:
            parts += (scale.shape[1:], scale.dtype, scale.device, scale.layout)
        for each in tensors.written:
            parts += (each.shape[1:], each.dtype, each.device, each.layout) if each is not None else (None,)
        kinds = type(options.top_k), type(options.most_tokens)  # True is equal to 1
        return (*parts, options, *kinds, ids is None, weights is None, trace, pass_)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _addresses(operands: dict[str, DeviceOperand]) -> dict[str, int]:
    """The addresses and strides of the layer's tensors, by the library's names; 0 for a missing tensor. Also the types
    of a given routing."""
    numbers = {
        "topk_ids_64": int("topk_ids" in operands and operands["topk_ids"].dtype == "int64"),
        "topk_weights_as_x": int("topk_weights" in operands and operands["topk_weights"].dtype != "float32"),
    }
    for name in ("gate_up_proj", "down_proj", "router", "shared_gate_up", "shared_down"):
        numbers |= _matrix(name, _aligned(name, operands[name]) if name in operands else _ABSENT)
    for name in ("shared_gate", "shared_up"):
        numbers[name] = _aligned(name, operands[name]).address if name in operands else 0
    for name in (*_VECTORS, *SCALE_OF.values()):
        numbers[name] = operands[name].address if name in operands else 0
    return numbers


def _aligned(name: str, each: DeviceOperand) -> DeviceOperand:
    """`each`, a matrix, checked to have rows that begin at multiples of `_ALIGNMENT` bytes, as copies need."""
    for what, count in (
        ("row stride", each.row_bytes),
        ("matrix stride", each.matrix_bytes),
        ("address", each.address),
    ):
        if count % _ALIGNMENT:
            raise InvalidArgument(
                f"{name}: expected rows that begin at multiples of {_ALIGNMENT} bytes, as the copy engine needs, got "
                f"the {what} {count} in bytes"
            )
    return each


def _written(wanted: Mapping[str, Any], apart: bool) -> dict[str, Any]:
    """The tensors to which the kernel writes the wanted gradients of a layer's tensors, by name: the tensors of
    `wanted`, or if the kernel cannot write to them, copies. If a shared expert's gate and up are two matrices
    (`apart`), the kernel writes both gradients or none, so an unwanted one gets memory of its own."""
    import torch

    written = {
        name: each
        if each.is_contiguous() and each.data_ptr() % _ALIGNMENT == 0
        else each.clone(memory_format=torch.contiguous_format)
        for name, each in wanted.items()
        if name in _GRADIENTS.values()
    }
    for name, other in (("shared_gate_up", "shared_up"), ("shared_up", "shared_gate_up")):
        if apart and name in written and other not in written:
            written[other] = torch.empty_like(written[name])
    return written


def _in_one_map(operands: dict[str, DeviceOperand]) -> bool:
    """Whether one tensor map can describe the shared expert's gates and ups. If they are two matrices, the map goes
    from the gates to the ups by a stride, which must be positive."""
    if "shared_up" not in operands:
        return True
    gate, up = operands["shared_gate_up"], operands["shared_up"]
    return gate.row_bytes == up.row_bytes and 0 < up.address - gate.address < _MOST_APART


def _matrix(name: str, each: DeviceOperand) -> dict[str, int]:
    return {name: each.address, f"{name}_row_bytes": each.row_bytes, f"{name}_expert_bytes": each.matrix_bytes}


def _address(name: str, tensor: Any, **sizes: int) -> int:
    """The address of a contiguous tensor of these sizes, whose type and device are already checked; 0 if there is
    none."""
    if tensor is None:
        return 0
    if tuple(tensor.shape) != tuple(sizes.values()) or not tensor.is_contiguous():
        expected = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
        raise InvalidArgument(
            f"{name}: expected [{expected}], contiguous, got {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
    refuse_unstored(name, tensor)
    return tensor.data_ptr()
