"""One rank's slice of a model that is cut by its tensor plan (harness/tensor_plan.py): parameters cut in place, and the
layers of the plan put in their places (parts/tensor_layers.py). Everything else of the model stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.chain import Border, borders
from harness.optimizer import norm_over_ranks
from harness.parameters import logical_parameters
from harness.tensor_plan import ColumnParallel, RowParallel, partial_parameters, resolve
from harness.workload import Workload, in_compute_precision
from harness.workload import cross_entropy_sum as plain_cross_entropy_sum
from impls.native.parts import tensor_layers, tensor_vocabulary
from impls.native.parts.counting_exchange import CountingExchange
from impls.native.parts.direct_gradients import Place, TrainingTask, can_be_written
from impls.native.parts.order_of_use import order_of_use
from impls.native.parts.rank_model import Kinds, RankModel, on_device
from impls.native.parts.tensor_cut import Cut, cuts_of, take_local
from impls.native.parts.tensor_exchange import TensorExchange
from impls.native.parts.tensor_layers import CutLayer, TensorContext

_META = torch.device("meta")


class TensorSlice(RankModel):
    """Collective over the exchange's group and `group`, which takes what is not on the way of a forward or backward;
    none where nothing is asked for between steps."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        exchange: TensorExchange,
        group: dist.ProcessGroup | None,
        whose: str,
        *,
        cuts_sequence: bool = False,
        data_degree: int = 1,
        module: nn.Module | None = None,
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        assert workload.tensor_plan is not None
        super().__init__(workload, device if module is not None else torch.device("cpu"), whose, module=module)
        self._facts = facts
        self._group, self._whose, self._data_degree = group, whose, data_degree
        self._pieces: dict[tuple[int, ...], list[int]] = {}  # by the inputs' shape the sizes of the context
        self.context = TensorContext(exchange=exchange, task=TrainingTask(), cuts_sequence=cuts_sequence)
        self._plan = resolve(self.module, workload.tensor_plan(self.module))
        whole = {parameter.name: parameter for parameter in self.parameters}
        self._cuts = cuts_of(self.module, self._plan, exchange.num_ranks)
        take_local(self.module, self._cuts, exchange.rank)
        self.module, self.device = on_device(self.module, device), device
        # Names, decay and ties are the whole parameters'; shapes are the slices'.
        self.parameters = tuple(
            replace(whole[parameter.name], shape=parameter.shape)
            for parameter in logical_parameters(self.module, workload.decays)
        )
        self._partial = partial_parameters(self.module, self._plan)
        if cuts_sequence:
            self._partial |= self._names_after_the_split(data_degree)
        self._layers: dict[str, CutLayer] = {}
        self._head_first: int | None = None
        self._put_layers_in_place()

    def kinds(self, name: str) -> Kinds:
        if name in self._cuts:
            return ("own",)
        return ("partial",) if name in self._partial else ("alike",)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        if self._head_first is None:
            return super().loss(outputs, targets)
        return tensor_vocabulary.cross_entropy_sum(outputs, targets, self._head_first, self.context)

    def borders(self, inputs: Tensor, *, evaluates: bool = False) -> tuple[Border, ...]:
        exchange = self.context.exchange
        without_values = TensorSlice(
            self.workload,
            _META,
            CountingExchange(exchange.num_ranks, exchange.rank),
            None,
            self._whose,
            cuts_sequence=self.context.cuts_sequence,
            data_degree=self._data_degree,
            module=in_compute_precision(self.workload, self.workload.model_without_memory()),
        )
        found = borders(self.workload, inputs, lambda: without_values.module, evaluates=evaluates)
        self._pieces[tuple(inputs.shape)] = without_values.context.sizes
        return found

    def begin_pass(self, inputs: Tensor) -> None:
        self.context.sizes = self._pieces[tuple(inputs.shape)]

    def write_directly(self, places: dict[str, Place], task: TrainingTask) -> None:
        self.context.task = task
        first_names = _first_names(self.module)
        for name, layer in self._layers.items():
            for kind in ("weight", "bias"):
                place = places.get(first_names.get(f"{name}.{kind}", ""))
                if place is not None and can_be_written(self.module.get_parameter(f"{name}.{kind}"), place.view):
                    setattr(layer, kind, place)
        super().write_directly(places, task)

    def sum_partial(self, kinds: Kinds, gradients: Tensor) -> None:
        if kinds == ("partial",):
            total = self.context.exchange.start_sum(gradients)()
            if total is not gradients:
                gradients.copy_(total)

    def counts(self, kinds: Kinds) -> bool:
        return kinds == ("own",) or self.context.exchange.rank == 0

    def norm_over_slices(self, own: Tensor) -> Tensor:
        assert self._group is not None
        return norm_over_ranks(own, self._group)

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._whole(self._cuts.get(name), value) for name, value in values.items()}

    def communication_buffers(self) -> Iterable[Tensor]:
        return self.context.exchange.buffers()

    def facts(self) -> Mapping[str, str]:
        return self._facts

    def close(self) -> None:
        self.context.exchange.close()

    def _whole(self, cut: Cut | None, local: Tensor) -> Tensor:
        if cut is None:
            return local.cpu()
        local = local.to(self.device)  # where the group's collectives are: NCCL takes nothing from the host
        of_ranks = []
        for rank in range(self.context.exchange.num_ranks):
            start, stop = cut.bounds(rank)
            shape = list(local.shape)
            shape[cut.dim] = cut.parts * (stop - start)
            of_ranks.append(local.contiguous() if rank == self.context.exchange.rank else local.new_empty(shape))
            if of_ranks[rank].numel():
                dist.broadcast(of_ranks[rank], group=self._group, group_src=rank)
        return cut.whole(of_ranks).cpu()

    def _put_layers_in_place(self) -> None:
        modules = dict(self.module.named_modules())
        columns: dict[str, list[str]] = {}
        for name, role in self._plan.roles.items():
            if isinstance(role, ColumnParallel):
                columns.setdefault(self._plan.region_of(name) or "", []).append(name)
        for name, role in self._plan.roles.items():
            module: Any = modules[name]
            layer = self._layers[name] = CutLayer(context=self.context)
            if isinstance(role, RowParallel):
                module.forward = partial(_row, module, layer)
            elif isinstance(role, ColumnParallel):
                layer.enters = self._enters_alone(columns[self._plan.region_of(name) or ""])
                module.forward = partial(_column, module, layer)
            else:
                self._put_vocabulary_in_place(name, module, layer)
        for region, names in columns.items():
            if not self._enters_alone(names):
                modules[region].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if self.context.cuts_sequence:
            first_block, *_ = self._blocks_with_regions()
            first_block.register_forward_pre_hook(self._split, prepend=True, with_kwargs=True)

    def _enters_alone(self, columns: Sequence[str]) -> bool:
        """Whether a region's column-parallel layer takes the input by itself. Not a piece of a sequence: what lies
        around the layer looks at its length."""
        return len(columns) == 1 and not self.context.cuts_sequence

    def _blocks_with_regions(self) -> list[nn.Module]:
        names = {module: name for name, module in self.module.named_modules()}
        return [
            block
            for block in self.workload.blocks(self.module)
            if any(region == names[block] or region.startswith(f"{names[block]}.") for region in self._plan.regions)
        ]

    def _names_after_the_split(self, data_degree: int) -> set[str]:
        """Of what is alike on all ranks what sees a piece of the sequence only: all that is used from the first cut
        block on."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        first_block, *_ = self._blocks_with_regions()
        in_first_block = {names[id(parameter)] for parameter in first_block.parameters()}
        order = order_of_use(self.workload, data_degree) or list(names.values())
        begin = min(order.index(name) for name in in_first_block if name in order)
        return {name for name in order[begin:] if name not in self._cuts}

    def _enter(self, region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _map_input(partial(tensor_layers.enter, context=self.context), args, kwargs)

    def _split(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _map_input(partial(tensor_layers.split_sequence, context=self.context), args, kwargs)

    def _gather_logits(self, cut: Cut, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        sizes = [stop - start for start, stop in map(cut.bounds, range(cut.degree))]
        return tensor_layers.gather_last(output, sizes, self.context)

    def _put_vocabulary_in_place(self, name: str, module: Any, layer: CutLayer) -> None:
        cut = self._cuts[f"{name}.weight"]
        layer.first, _ = cut.bounds(self.context.exchange.rank)
        if isinstance(module, nn.Embedding):
            _check_plain(name, module)
            module.forward = partial(_embed, module, layer)  # type: ignore[method-assign]
            return
        layer.enters = True
        module.forward = partial(_column, module, layer)
        is_plain = self.workload.loss is plain_cross_entropy_sum
        if is_plain and tensor_vocabulary.yields_logits(self.workload, name, self._data_degree):
            self._head_first = layer.first
        else:
            module.register_forward_hook(partial(self._gather_logits, cut))


def _column(module: nn.Linear, layer: CutLayer, inputs: Tensor) -> Tensor:
    return tensor_layers.column_linear(inputs, module.weight, module.bias, layer)


def _row(module: nn.Linear, layer: CutLayer, inputs: Tensor) -> Tensor:
    return tensor_layers.row_linear(inputs, module.weight, module.bias, layer)


def _embed(module: nn.Embedding, layer: CutLayer, indices: Tensor) -> Tensor:
    return tensor_vocabulary.embedding(indices, module.weight, layer)


def _first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter the first of its names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names


def _map_input(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with `change` applied to its input: the first tensor of activations; masks and positions
    come after it."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:place], change(value), *args[place + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return args, kwargs | {name: change(value)}
    raise ValueError("tensor plan: expected a module that is called with activations, got none")


def _check_plain(name: str, module: nn.Embedding) -> None:
    if (module.max_norm, module.padding_idx) != (None, None) or module.scale_grad_by_freq or module.sparse:
        raise ValueError(f"tensor plan: {name} does more than look up: max_norm, padding_idx, sparse and the like")
