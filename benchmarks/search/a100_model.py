"""Prices one training step of GPT in Megatron-LM on nodes of 8 A100s.

Each kernel of a layer is listed as Megatron launches it and priced with the library's own A100
rates (`shardwise._time`): products by their shapes, everything else by the bytes it streams,
collectives by their groups. What the library cannot know, because it is PyTorch's and not the
chip's, is in `Constants`: eleven numbers, fitted by `a100_fit.py`.
"""

import dataclasses
import functools
import math

from shardwise._chips import parse_chips
from shardwise._time import gpu_rates, product_seconds
from shardwise._time.links import gpu_seconds

VOCAB = 51_200  # GPT-2's 50,257 words, padded as Megatron does
NODE = 8
RATES = gpu_rates("a100")
# Adam on float32 copies: gradient, copy and both moments are read, all but the first are written.
OPTIMIZER_BYTES = 28
# 800 Gb/s between nodes, as vTrain states: 12.5 GB/s for each GPU.
NETWORK = 100e9 / NODE


@dataclasses.dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted to measured rows.

    Attributes:
        attention: how much longer than the library says the batched products of attention take:
            their operands are strided views.
        logit_bytes: bytes streamed for each logit by the loss and its gradient, in float32 and
            unfused.
        gradient_bytes: bytes streamed for each parameter and micro batch to accumulate gradients.
        launch: seconds in which Python launches the kernels of one layer, forward and backward.
        straggle: seconds by which each process of a tensor group delays the launches of one layer:
            its all-reduces wait for the slowest.
        unfused: more launches, where Megatron's fused softmax does not apply.
        micro_launch: the same for what a micro batch needs besides its layers.
        overlap: the share of the shorter of launches and kernels that is not hidden behind the
            other if both take equally long, on one device.
        network: the share of the network's bandwidth that is left for one job.
        arrival: seconds that each all-reduce of a tensor group waits for its slowest device.
        crowding: how much longer the passes of a pipeline take, where each node has several
            pipelines and each stage several nodes, for each doubling of both.
    """

    attention: float
    logit_bytes: float
    gradient_bytes: float
    launch: float
    straggle: float
    unfused: float
    micro_launch: float
    overlap: float
    network: float
    arrival: float
    crowding: float


FITTED = Constants(
    attention=1.557,
    logit_bytes=205.3,
    gradient_bytes=16.05,
    launch=3.149e-3,
    straggle=7.433e-5,
    unfused=1.052e-3,
    micro_launch=3.072e-3,
    overlap=0.2411,
    network=0.6379,
    arrival=5.024e-5,
    crowding=0.0493,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """One row of the table, without its measurement."""

    devices: int
    global_batch: int
    micro_batch: int
    width: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int

    @property
    def micros(self) -> int:
        """How many micro batches each replica runs in one step."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def recomputed(self) -> bool:
        """Whether the backward pass runs each layer again.

        The rows do not say. With the opposite choice, those on one node are predicted 28% too long
        and those on several nodes 25% too short.
        """
        return self.devices > NODE


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """The kernels of one pass through a layer, or through the head.

    Attributes:
        products: seconds of its products.
        attention: seconds of attention's batched products.
        streamed: seconds of the kernels that stream through memory.
    """

    products: float
    attention: float
    streamed: float


def _linear(rows, columns, contracted, batch=1):
    """Returns the seconds of `x @ w.T`, and of both gradients."""
    price = functools.partial(product_seconds, RATES, "bf16")
    forward = price(rows, columns, contracted, batch=batch, lies=(True, True))
    for_input = price(rows, contracted, columns, batch=batch, lies=(True, False))
    for_weight = price(columns, contracted, rows, batch=batch, lies=(False, False))
    return forward, for_input + for_weight


def _streamed(*sizes):
    return sum(RATES.kernel + size / RATES.bandwidth for size in sizes)


def fused_softmax(micro, heads, tensor):
    """Returns whether Megatron's softmax kernel applies: it takes four heads at once."""
    return micro * heads // tensor % 4 == 0


@functools.cache
def layer_passes(width, heads, sequence, micro, tensor):
    """Returns the forward and the backward pass of one layer on one device."""
    tokens, depth = micro * sequence, width // heads
    own = max(1, micro * heads // tensor)
    shapes = [
        (3 * width // tensor, width),
        (width, width // tensor),
        (4 * width // tensor, width),
        (width, 4 * width // tensor),
    ]
    products = [_linear(tokens, columns, contracted) for columns, contracted in shapes]
    scores = [_linear(sequence, sequence, depth, own), _linear(sequence, depth, sequence, own)]
    x = 2 * tokens * width  # bytes of the activations that every device of a group holds
    y = x // tensor  # of those that are split
    s = 2 * own * sequence * sequence  # of the attention scores
    forward = [
        *(2 * x,) * 2,  # LayerNorm
        2 * s,  # softmax with its scale and mask
        2.5 * s,  # dropout, with a mask of one byte
        2 * y,  # the heads side by side
        *(3.5 * x,) * 2,  # bias, dropout and residual
        8 * y,  # bias and GELU
    ]
    backward = [
        *(4 * x,) * 2,  # LayerNorm
        3 * s,
        2.5 * s,
        2 * y,
        3 * y,  # the gradients of queries, keys and values side by side
        *(2.5 * x,) * 2,  # dropout
        *(x,) * 2,  # bias
        2 * x,  # residual
        12 * y,  # GELU
    ]
    if not fused_softmax(micro, heads, tensor):
        # Scaled, masked and cast to float32 and back by separate kernels.
        forward += [3 * s, 3 * s, 3 * s]
        backward += [3 * s, 4 * s]
    return tuple(
        Pass(sum(p[i] for p in products), sum(p[i] for p in scores), _streamed(*streams))
        for i, streams in enumerate((forward, backward))
    )


@functools.cache
def head_passes(width, sequence, micro, tensor):
    """Returns the seconds of the head's products, forward and backward."""
    return _linear(micro * sequence, VOCAB // tensor, width)


@functools.cache
def cluster(devices, network):
    """Returns A100s in nodes of 8, with the network that vTrain states."""
    chips = parse_chips(f"a100:{-(-devices // NODE)}x{min(NODE, devices)}")
    slower = dataclasses.replace(chips.chip, network_bytes_per_second=network * NETWORK)
    return dataclasses.replace(chips, chip=slower)


@functools.cache
def collective(chips, kind, size, group):
    """Returns the seconds of a collective among these devices."""
    return gpu_seconds(chips, kind, size, [group]).seconds


def overlapped(launches, kernels, tensor, constants):
    """Returns how long a stretch of work takes that Python launches while the device runs.

    The longer of the two, and a share of the shorter one: little if they differ much, because one
    of them is then always ahead. Each all-reduce waits for the slowest process of its tensor group,
    so the share grows with the group.
    """
    longer, shorter = max(launches, kernels), min(launches, kernels)
    exposed = constants.overlap * math.sqrt(tensor) * (shorter / longer) ** 2
    return longer + exposed * shorter


def one_f_one_b(forward, backward, transfer, micros):
    """Returns the seconds of a pipeline in which each stage alternates the passes (1F1B).

    Args:
        forward: seconds of each stage's forward pass of one micro batch.
        backward: of its backward pass.
        transfer: seconds until the next stage has what one has finished.
        micros: how many micro batches there are.
    """
    stages = len(forward)
    if micros > 4 * stages:
        # Once the pipeline is full, each further micro batch takes as long as the slowest stage.
        further = micros - 4 * stages
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
        return one_f_one_b(forward, backward, transfer, 4 * stages) + further * slowest
    clocks = [0.0] * stages
    done = [([], []) for _ in range(stages)]  # when each forward and backward pass ended

    def run(stage):
        """Runs one pass of a stage, if what it needs is there; returns whether it was."""
        ahead, behind = (len(passes) for passes in done[stage])
        warm = min(micros, stages - stage)
        turn = 0 if ahead < micros and ahead - behind < warm else 1
        micro, near = (ahead, behind)[turn], stage + (-1, 1)[turn]
        ready = 0.0
        if 0 <= near < stages:
            if len(done[near][turn]) <= micro:
                return False
            ready = done[near][turn][micro] + transfer
        clocks[stage] = max(clocks[stage], ready) + (forward, backward)[turn][stage]
        done[stage][turn].append(clocks[stage])
        return True

    left = 2 * micros * stages
    while left:
        for stage in range(stages):
            while len(done[stage][1]) < micros and run(stage):
                left -= 1
    return max(clocks)


def stage_seconds(layout, constants, chips):
    """Returns the seconds of each stage's forward and backward pass of one micro batch."""
    width, tensor, micro = layout.width, layout.tensor, layout.micro_batch
    size = 2 * micro * layout.sequence * width
    reduced = 0.0
    if tensor > 1:
        # Two all-reduces in each pass of a layer.
        one = collective(chips, "all-reduce", size, range(tensor))
        reduced = 2 * (one + constants.arrival)
    passes = layer_passes(width, layout.heads, layout.sequence, micro, tensor)
    kernels = [
        p.products + constants.attention * p.attention + p.streamed + reduced for p in passes
    ]
    bandwidth = RATES.bandwidth
    kernels[1] += constants.gradient_bytes * 12 * width**2 / tensor / bandwidth
    launches = constants.launch + constants.straggle * (tensor - 1)
    if not fused_softmax(micro, layout.heads, tensor):
        launches += constants.unfused
    # A backward pass launches about twice the kernels of a forward pass.
    launches = [launches / 3, 2 * launches / 3]
    if layout.recomputed:
        kernels[1] += kernels[0]
        launches[1] += launches[0]
    embedding = 5 * size / bandwidth
    table = constants.gradient_bytes * VOCAB * width / tensor / bandwidth
    head = head_passes(width, layout.sequence, micro, tensor)
    loss = constants.logit_bytes * micro * layout.sequence * VOCAB / tensor / bandwidth
    found = []
    for stage in range(layout.pipeline):
        layers = (layout.layers + layout.pipeline - 1 - stage) // layout.pipeline
        busy = [layers * k for k in kernels]
        waits = [layers * k for k in launches]
        if stage == 0:
            busy = [busy[0] + embedding, busy[1] + embedding + table]
        if stage == layout.pipeline - 1:
            busy = [busy[0] + head[0] + loss / 2, busy[1] + head[1] + loss / 2 + table]
            waits[0] += constants.micro_launch
        if layout.pipeline == 1:
            # Nothing waits between the passes.
            both = overlapped(sum(waits), sum(busy), tensor, constants)
            found.append((both, 0.0))
        else:
            pair = zip(waits, busy, strict=True)
            found.append(tuple(overlapped(*p, tensor, constants) for p in pair))
    return found


def step_seconds(layout, constants=FITTED):
    """Returns the modelled seconds of one training step."""
    tensor, data, stages = layout.tensor, layout.data, layout.pipeline
    chips = cluster(layout.devices, constants.network)
    slower = 1.0
    if stages > 1 and 1 < tensor < NODE < tensor * data:
        # What makes them slower is not known: see a100.md.
        slower += constants.crowding * math.log2(NODE / tensor) * math.log2(tensor * data / NODE)
    passes = [[slower * x for x in pair] for pair in stage_seconds(layout, constants, chips)]
    forward, backward = zip(*passes, strict=True)
    transfer = 0.0
    if stages > 1:
        # Ranks count tensor first, pipeline last. Each device of a tensor group sends its part.
        size = 2 * layout.micro_batch * layout.sequence * layout.width / tensor
        transfer = collective(chips, "collective-permute", size, (0, data * tensor))
    seconds = one_f_one_b(forward, backward, transfer, layout.micros)
    table = VOCAB * layout.width / tensor
    layers = math.ceil(layout.layers / stages)
    held = layers * 12 * layout.width**2 / tensor + table
    if data > 1:
        # Gradients are reduced in 16 bits after the last micro batch.
        group = range(0, data * tensor, tensor)
        seconds += collective(chips, "all-reduce", 2 * held, group)
    if stages > 1:
        # The first and the last stage share the table of the embedding.
        ends = (0, data * tensor * (stages - 1))
        seconds += collective(chips, "all-reduce", 2 * table, ends)
    return seconds + OPTIMIZER_BYTES * held / RATES.bandwidth


def parameters(layout):
    """Returns how many parameters the model has."""
    return layout.layers * 12 * layout.width**2 + VOCAB * layout.width


def flops(layout):
    """Returns the operations of a step without recomputation, attention unmasked as Megatron's."""
    tokens = layout.global_batch * layout.sequence
    attention = 12 * layout.layers * layout.width * layout.sequence * tokens
    return 6 * parameters(layout) * tokens + attention
