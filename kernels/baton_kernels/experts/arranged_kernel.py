"""The products of blocks of rows with their experts' MXFP4 weights, in Gluon: codes become numbers in the registers
from which the tensor cores take them.

In each program, one warp makes the tensor memory accelerator copy an expert's tile and a block's rows of x, step by
step; one or two groups of 4 warps multiply by 64 rows of the weight each. To decode 8 codes takes a warp 15
instructions, and 2 for their scales (`arranged`; the decoding follows OpenAI's triton_kernels). That takes longer than
reading the codes from memory, however few rows of x there are.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton_kernels.experts.kernel import apply_gate

_DECODE = gl.constexpr("""
{
    .reg .b32 a, b;
    and.b32 a, $8, 0x81c081c0;
    mul.rn.bf16x2 a, a, $9;
    mov.b32 {$0, $1}, a;
    shl.b32 a, $8, 3;
    and.b32 a, a, 0x81c081c0;
    mul.rn.bf16x2 a, a, $9;
    mov.b32 {$2, $3}, a;
    shl.b32 a, $8, 6;
    and.b32 a, a, 0x81c081c0;
    mul.rn.bf16x2 a, a, $10;
    mov.b32 {$4, $5}, a;
    shl.b32 a, $8, 1;
    and.b32 a, a, 0x80008000;
    shr.u32 b, $8, 3;
    and.b32 b, b, 0x01800180;
    or.b32 a, a, b;
    shr.u32 b, $8, 7;
    and.b32 b, b, 0x00400040;
    or.b32 a, a, b;
    mul.rn.bf16x2 a, a, $10;
    mov.b32 {$6, $7}, a;
}
""")

# A lane has its 4 adjacent words of a row, and those of the row 8 below.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
)


@gluon.jit
def _operand(a, b, c, d, LEFT: gl.constexpr):
    """Join the numbers of words into an operand, [64, 64]: q is outside, p inside."""
    split = gl.join(gl.join(a, b), gl.join(c, d)).reshape([64, 4, 4, 2, 2])
    return gl.convert_layout(split.permute([0, 2, 4, 1, 3]).reshape([64, 64]), LEFT, assert_trivial=True)


@gluon.jit
def _copy(
    x_desc,
    weight_desc,
    x_buffers,
    weight_buffers,
    full,
    empty,
    num_steps,
    x_row,
    weight_row,
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    for step in range(num_steps):
        buffer = step % STAGES
        mbarrier.wait(empty.index(buffer), ((step // STAGES) & 1) ^ 1)
        bar = full.index(buffer)
        mbarrier.expect(bar, ROWS * 256 + GROUPS * 4096)
        for group in gl.static_range(GROUPS):
            target = weight_buffers.index(buffer * GROUPS + group)
            tma.async_copy_global_to_shared(weight_desc, [weight_row + group * 64, step * 16], bar, target)
        for half in gl.static_range(2):
            target = x_buffers.index(2 * buffer + half)
            tma.async_copy_global_to_shared(x_desc, [x_row, step * 128 + half * 64], bar, target)


@gluon.jit
def _choices(
    order_ptr,
    slot_mapping_ptr,
    expert,
    block,
    num_choices,
    TOP_K: gl.constexpr,
    ROWS: gl.constexpr,
    BY_CHOICE: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    HAS_PADDING: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The choices of the block's rows, [ROWS]; num_choices for rows of no choice."""
    row = gl.arange(0, ROWS, layout=LAYOUT)
    if BY_CHOICE:
        choice = gl.where(row == 0, block, num_choices)
    elif BY_TOKEN:
        choice = gl.where(row < 0, row, num_choices)
        there = row < num_choices // TOP_K
        if HAS_PADDING:
            there = there & (gl.load(slot_mapping_ptr + row, mask=there, other=0) > 0)
        for slot in gl.static_range(TOP_K):
            found = gl.load(order_ptr + row * TOP_K + slot, mask=there, other=-1)
            choice = gl.where(found == expert, row * TOP_K + slot, choice)
    else:
        choice = gl.load(order_ptr + block * ROWS + row)
    return choice


@gluon.jit
def _step(
    sums,
    scale,
    next_scales,
    shift,
    x_buffers,
    weight_buffers,
    full,
    empty,
    BUFFER: gl.constexpr,
    turn,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """Returns the sums with this step's products added, and the next step's scales, which are always there to load."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    mbarrier.wait(full.index(BUFFER), turn & 1)
    following = gl.load(next_scales)
    words = weight_buffers.index(BUFFER * GROUPS + GROUP).load(_WORDS)
    low_scale = ((scale[:, None] >> shift[None, :]) & 255) * 0x00800080
    high_scale = ((scale[:, None] >> (shift + 16)[None, :]) & 255) * 0x00800080
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _DECODE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, low_scale, high_scale],
        dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    low, high = _operand(a, b, c, d, LEFT), _operand(e, f, g, h, LEFT)
    x, high_x = x_buffers.index(2 * BUFFER).permute([1, 0]), x_buffers.index(2 * BUFFER + 1).permute([1, 0])
    sums = warpgroup_mma(low, x, sums, is_async=True)
    sums = warpgroup_mma(high, high_x, sums, is_async=True)
    sums, low, high = warpgroup_mma_wait(0, deps=[sums, low, high])
    debug_barrier()  # one thread arrives for all
    mbarrier.arrive(empty.index(BUFFER), count=1)
    return sums, following


@gluon.jit
def _multiply(
    x_buffers,
    weight_buffers,
    full,
    empty,
    scale_ptr,
    bias_ptr,
    routed_ptr,
    order_ptr,
    slot_mapping_ptr,
    out_ptr,
    num_turns,
    block,
    expert,
    tile,
    num_choices,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    NUM_STEPS: gl.constexpr,
    WIDTH: gl.constexpr,
    TOP_K: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BY_CHOICE: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    HAS_PADDING: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """num_turns: how often all stages are used in full, before the last steps; -1: there is no such block. WIDTH:
    features of the result. GATE: the product is gate and up, with results in the order of the blocks; None: it is down,
    with results multiplied by the router's weights, in the order of the choices."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    WEIGHT_ROWS: gl.constexpr = WIDTH if GATE is None else 2 * WIDTH
    own = tile * GROUPS + GROUP
    weight_row = gl.minimum(own * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS)), WEIGHT_ROWS - 1)
    shift = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS)) % 4 // 2 * 8
    scales = scale_ptr + weight_row
    following = gl.load(scales)
    sums = gl.zeros([64, ROWS], gl.float32, PRODUCT)
    for turn in range(num_turns):
        for buffer in gl.static_range(STAGES):
            following_step = turn * STAGES + buffer + 1
            if buffer == STAGES - 1:
                following_step = gl.minimum(following_step, NUM_STEPS - 1)
            sums, following = _step(
                sums, following, scales + following_step * WEIGHT_ROWS, shift, x_buffers, weight_buffers, full, empty,
                buffer, turn, GROUP, GROUPS, PRODUCT,
            )  # fmt: skip
    if num_turns >= 0:
        for buffer in gl.static_range(NUM_STEPS % STAGES):
            following_step = num_turns * STAGES + buffer + (0 if buffer == NUM_STEPS % STAGES - 1 else 1)
            sums, following = _step(
                sums, following, scales + following_step * WEIGHT_ROWS, shift, x_buffers, weight_buffers, full, empty,
                buffer, num_turns, GROUP, GROUPS, PRODUCT,
            )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    if num_turns >= 0:
        if GATE is None:
            feature = own * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
            inside = feature < WIDTH
            if HAS_BIAS:
                bias = gl.load(bias_ptr + expert.to(gl.int64) * WIDTH + feature, mask=inside, other=0.0)
                sums += bias.to(gl.float32)[:, None]
            choice = _choices(
                order_ptr, slot_mapping_ptr, expert, block, num_choices, TOP_K, ROWS, BY_CHOICE, BY_TOKEN, HAS_PADDING,
                gl.SliceLayout(0, PRODUCT),
            )  # fmt: skip
            taken = choice < num_choices
            sums *= gl.load(routed_ptr + choice, mask=taken, other=0.0).to(gl.float32)[None, :]
            outs = out_ptr + choice.to(gl.int64)[None, :] * WIDTH + feature[:, None]
            gl.store(outs, sums.to(DTYPE), mask=inside[:, None] & taken[None, :])
        else:
            gate, up = gl.split(sums.reshape([4, 2, 8, ROWS]).permute([0, 2, 3, 1]))
            gate, up = gate.reshape([32, ROWS]), up.reshape([32, ROWS])
            feature = own * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, gate.type.layout))
            inside = feature < WIDTH
            if HAS_BIAS:
                biases = bias_ptr + expert.to(gl.int64) * (2 * WIDTH) + feature * (2 if INTERLEAVED else 1)
                gate += gl.load(biases, mask=inside, other=0.0).to(gl.float32)[:, None]
                up += gl.load(biases + (1 if INTERLEAVED else WIDTH), mask=inside, other=0.0).to(gl.float32)[:, None]
            values = apply_gate(gate, up, GATE, ALPHA, LIMIT, DTYPE)
            row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gate.type.layout))
            outs = out_ptr + row.to(gl.int64)[None, :] * WIDTH + feature[:, None]
            gl.store(outs, values.to(DTYPE), mask=inside[:, None])


@gluon.jit(do_not_specialize=["num_choices", "most", "band"])
def arranged_kernel(
    x_desc,
    weight_desc,
    scale_ptr,
    bias_ptr,
    routed_ptr,
    order_ptr,
    slot_mapping_ptr,
    expert_of_ptr,
    count_ptr,
    out_ptr,
    num_choices,
    most,
    band,
    NUM_EXPERTS: gl.constexpr,
    WIDTH: gl.constexpr,
    NUM_STEPS: gl.constexpr,
    TOP_K: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    BY_CHOICE: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    HAS_PADDING: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """A block's rows of x begin at `block * ROWS`; for gate and up, at the choice's token if BY_CHOICE, and at 0 if
    BY_TOKEN. REGISTERS: of a thread in the second group of warps."""
    GATED: gl.constexpr = GATE is not None
    WEIGHT_ROWS: gl.constexpr = 2 * WIDTH if GATED else WIDTH
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x_buffers = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2 * STAGES, ROWS, 64], x_desc.layout)
    weight_buffers = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 64, 16], weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    program = gl.program_id(0)
    num_tiles: gl.constexpr = (WEIGHT_ROWS + 64 * GROUPS - 1) // (64 * GROUPS)
    first = program // (band * num_tiles)
    height = gl.minimum(most - first * band, band)
    place = program - first * (band * num_tiles)
    block, tile = first * band + place % height, place // height
    if PDL:
        gdc_wait()
    x_row = block * ROWS
    if BY_CHOICE:
        expert = gl.load(order_ptr + block).to(gl.int32)
        is_there = expert < NUM_EXPERTS
        if HAS_PADDING:
            is_there = is_there & (gl.load(slot_mapping_ptr + block // TOP_K) > 0)
        if GATED:
            x_row = block // TOP_K
    elif BY_TOKEN:
        expert = block
        choice = _choices(
            order_ptr, slot_mapping_ptr, expert, block, num_choices, TOP_K, ROWS, BY_CHOICE, BY_TOKEN, HAS_PADDING, FLAT
        )
        is_there = gl.min(choice, 0) < num_choices
        if GATED:
            x_row = block * 0
    else:
        is_there = block < gl.load(count_ptr)
        expert = gl.load(expert_of_ptr + block)
    num_steps, num_turns = gl.where(is_there, NUM_STEPS, 0), gl.where(is_there, NUM_STEPS // STAGES, -1)
    expert = gl.where(is_there, expert, 0)
    weight_row = expert * WEIGHT_ROWS + tile * (64 * GROUPS)
    own_scales = scale_ptr + expert.to(gl.int64) * (NUM_STEPS * WEIGHT_ROWS)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_buffers, weight_buffers, full, empty, own_scales, bias_ptr, routed_ptr, order_ptr,
                    slot_mapping_ptr, out_ptr, num_turns, block, expert, tile, num_choices, 0, GROUPS, NUM_STEPS,
                    WIDTH, TOP_K, ROWS, STAGES, BY_CHOICE, BY_TOKEN, HAS_PADDING, INTERLEAVED, HAS_BIAS,
                    GATE, ALPHA, LIMIT, PDL,
                )),
                (_copy, (
                    x_desc, weight_desc, x_buffers, weight_buffers, full, empty, num_steps, x_row, weight_row,
                    ROWS, GROUPS, STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_buffers, weight_buffers, full, empty, own_scales, bias_ptr, routed_ptr, order_ptr,
                    slot_mapping_ptr, out_ptr, num_turns, block, expert, tile, num_choices, 0, GROUPS, NUM_STEPS,
                    WIDTH, TOP_K, ROWS, STAGES, BY_CHOICE, BY_TOKEN, HAS_PADDING, INTERLEAVED, HAS_BIAS,
                    GATE, ALPHA, LIMIT, PDL,
                )),
                (_multiply, (
                    x_buffers, weight_buffers, full, empty, own_scales, bias_ptr, routed_ptr, order_ptr,
                    slot_mapping_ptr, out_ptr, num_turns, block, expert, tile, num_choices, 1, GROUPS, NUM_STEPS,
                    WIDTH, TOP_K, ROWS, STAGES, BY_CHOICE, BY_TOKEN, HAS_PADDING, INTERLEAVED, HAS_BIAS,
                    GATE, ALPHA, LIMIT, PDL,
                )),
                (_copy, (
                    x_desc, weight_desc, x_buffers, weight_buffers, full, empty, num_steps, x_row, weight_row,
                    ROWS, GROUPS, STAGES,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
