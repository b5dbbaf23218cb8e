"""The machine on programs of a few lines: what instructions compute, and that each check bites."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.emulation import machine
from tests.emulation.machine import Counts, Kernel
from tests.emulation.memory import Fault, Memory
from tests.emulation.ptx import programs

HEADER = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 in, .param .u64 .ptr .global .align 1 out)
.reqntid {threads}
{{
    .reg .b32 %r<60>; .reg .b64 %rd<20>; .reg .f32 %f<20>; .reg .b16 %h<8>; .reg .pred %p<8>;
    ld.param.b64 %rd1, [in]; ld.param.b64 %rd2, [out]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
"""
LOAD, STORE = "ld.global.b32 %r2, [%rd4];", "st.global.b32 [%rd5], %r3; ret; }"


def run(
    body: str, given: np.ndarray[Any, Any], results: int | None = None, threads: int = 32, blocks: int = 1,
    shared: int = 0, counts: Counts | None = None,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """What a kernel leaves in `results` words when it has read the words of `given`; both of the same dtype."""
    text = ".extern .shared .align 16 .b8 smem[];\n" + HEADER.format(threads=threads) + body
    kernel = Kernel(programs(text)["kernel"])
    memory, size = Memory(32768, 4), given.size if results is None else results
    for at, words in ((4096, given.size), (16384, size)):
        memory.open(at, (words,), (1,))
    memory.bytes[4096 : 4096 + given.nbytes] = given.view(np.uint8)
    arguments = [np.int64(at).tobytes() for at in (4096, 16384)]
    kernel.launch(arguments, (blocks, 1, 1), (threads, 1, 1), shared, memory, counts)
    return memory.bytes[16384 : 16384 + 4 * size].view(given.dtype)


INTEGERS = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
INTEGERS[:6] = (0, 1, 2**31, 2**32 - 1, 0x80FF7F01, 31)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("shl.b32 %r3, %r2, 5;", lambda x: x << 5 & 0xFFFFFFFF),
        ("shl.b32 %r3, 3, %r2;", lambda x: 3 << x & 0xFFFFFFFF if x < 32 else 0),
        ("shr.s32 %r3, %r2, 40;", lambda x: 0xFFFFFFFF if x >> 31 else 0),
        ("shr.u32 %r3, %r2, 40;", lambda x: 0),
        ("bfe.u32 %r3, %r2, 4, 9;", lambda x: x >> 4 & 0x1FF),
        ("bfe.s32 %r3, %r2, 4, 9;", lambda x: ((x >> 4 & 0x1FF) ^ 0x100) - 0x100 & 0xFFFFFFFF),
        ("mul.hi.u32 %r3, %r2, %r2;", lambda x: x * x >> 32),
        ("mul.lo.s32 %r3, %r2, -7;", lambda x: x * -7 & 0xFFFFFFFF),
        ("mad.lo.s32 %r3, %r2, 3, %r2;", lambda x: x * 4 & 0xFFFFFFFF),
        ("prmt.b32 %r3, %r2, 0, 0x0123;", lambda x: int.from_bytes(x.to_bytes(4, "little"), "big")),
        ("prmt.b32 %r3, %r2, %r2, 0x888B;", lambda x: sum((255 if x >> s & 128 else 0) << i
                                                         for s, i in ((24, 0), (0, 8), (0, 16), (0, 24)))),
        ("popc.b32 %r3, %r2;", lambda x: x.bit_count()),
        ("setp.lt.s32 %p1, %r2, 0; selp.b32 %r3, 7, %r2, %p1;", lambda x: 7 if x >> 31 else x),
        ("setp.lo.u32 %p1, %r2, 9; mov.b32 %r3, 2; @!%p1 mov.b32 %r3, 5;", lambda x: 2 if x < 9 else 5),
        ("mov.b32 {%h1, %h2}, %r2; mov.b32 %r3, {%h2, %h1};", lambda x: x >> 16 | x << 16 & 0xFFFFFFFF),
        ("{ .reg .b32 %r2; mov.b32 %r2, 9; } mov.b32 %r3, %r2;", lambda x: x),
        ("cvt.s64.s32 %rd6, %r2; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r3, %rd6;", lambda x: -(x >> 31) & 0xFFFFFFFF),
    ],
)  # fmt: skip
def test_integers(line: str, expected: Callable[[int], int]) -> None:
    assert run(LOAD + line + STORE, INTEGERS).tolist() == [expected(int(x)) for x in INTEGERS]


NUMBERS = torch.tensor([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.5, 3.5, 1e30, 3.4e38, float("inf"), -0.3, 6e4])
NUMBERS = torch.cat(
    [NUMBERS, torch.tensor([float("nan")]), torch.randn(19, generator=torch.Generator().manual_seed(0))]
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cvt.rn.bf16.f32 %h1, %f1; cvt.f32.bf16 %f2, %h1;", lambda x: x.bfloat16().float()),
        ("cvt.rn.f16.f32 %h1, %f1; cvt.f32.f16 %f2, %h1;", lambda x: x.half().float()),
        ("cvt.rn.bf16x2.f32 %r4, %f1, 0f40000000; shl.b32 %r5, %r4, 16; mov.b32 %f2, %r5;",
         lambda x: torch.full_like(x, 2.0)),
        ("fma.rn.f32 %f2, %f1, %f1, 0fBF800000;", lambda x: (x.double() * x.double() - 1).float()),
        ("max.f32 %f2, %f1, 0f00000000;", lambda x: torch.fmax(x, torch.zeros(()))),
        ("setp.ltu.f32 %p1, %f1, 0f3F800000; selp.f32 %f2, %f1, 0f00000000, %p1;",
         lambda x: torch.where((x < 1) | x.isnan(), x, 0.0)),
        ("setp.ne.f32 %p1, %f1, %f1; selp.f32 %f2, 0f40000000, 0f3F800000, %p1;", torch.ones_like),
        ("ex2.approx.f32 %f2, %f1;", torch.exp2),
    ],
)  # fmt: skip
def test_floating_point(line: str, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = torch.from_numpy(run("ld.global.f32 %f1, [%rd4];" + line + "st.global.f32 [%rd5], %f2; ret; }",
                                  NUMBERS.numpy()))  # fmt: skip
    torch.testing.assert_close(result, expected(NUMBERS), equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("shfl.sync.bfly.b32 %r3, %r2, 5, 31, -1;", lambda i: i ^ 5),
        ("shfl.sync.up.b32 %r3, %r2, 3, 0, -1;", lambda i: i - 3 if i >= 3 else i),
        ("shfl.sync.down.b32 %r3|%p1, %r2, 3, 31, -1; @!%p1 mov.b32 %r3, 99;", lambda i: i + 3 if i < 29 else 99),
        ("shfl.sync.idx.b32 %r3, %r2, 1, 6175, -1;", lambda i: i // 8 * 8 + 1),  # segments of eight lanes
        ("redux.sync.add.s32 %r3, %r2, -1;", lambda i: 31 * 16),
        ("setp.lt.u32 %p1, %r2, 3; vote.sync.ballot.b32 %r3, %p1, -1;", lambda i: 7),
    ],
)
def test_shuffles(line: str, expected: Callable[[int], int]) -> None:
    given = np.arange(32, dtype=np.uint32)
    assert run(LOAD + line + STORE, given).tolist() == [expected(i) for i in range(32)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_product_of_matrices_that_come_through_shared_memory(kind: torch.dtype) -> None:
    """A by rows and B by columns in shared memory, as ldmatrix wants them; the sum in fp32."""
    a, b = torch.randn(16, 16).to(kind), torch.randn(16, 8).to(kind)
    words = torch.cat([a.flatten(), b.t().flatten()]).view(torch.int32).numpy().view(np.uint32)  # 192 words, 6 a lane
    copy = "".join(f"ld.global.b32 %r{20 + i}, [%rd4+{128 * i}]; st.shared.b32 [%r4+{128 * i}], %r{20 + i};"
                   for i in range(6))  # fmt: skip
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[kind]
    body = f"""
    mov.b32 %r4, smem; shl.b32 %r5, %r1, 2; add.s32 %r4, %r4, %r5; {copy} bar.sync 0;
    and.b32 %r6, %r1, 15; shl.b32 %r6, %r6, 5; shr.u32 %r7, %r1, 4; shl.b32 %r7, %r7, 4; add.s32 %r6, %r6, %r7;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
    and.b32 %r6, %r1, 7; shl.b32 %r6, %r6, 5; shr.u32 %r7, %r1, 3; and.b32 %r7, %r7, 1; shl.b32 %r7, %r7, 4;
    add.s32 %r6, %r6, %r7;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r14, %r15}}, [%r6+512];
    mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%f1, %f2, %f3, %f4}}, {{%r10, %r11, %r12, %r13}},
        {{%r14, %r15}}, {{0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000}};
    shl.b64 %rd3, %rd3, 1; add.s64 %rd5, %rd2, %rd3;
    st.global.v2.f32 [%rd5], {{%f1, %f2}}; st.global.v2.f32 [%rd5+256], {{%f3, %f4}}; ret; }}"""
    result = run(body, words, results=128, shared=768).view(np.float32).reshape(16, 8)
    torch.testing.assert_close(torch.from_numpy(result), a.float() @ b.float() + 1, rtol=1e-5, atol=1e-5)


def test_threads_that_part_meet_again() -> None:
    """A loop of as many rounds as the thread's number, around a barrier's other side."""
    body = (
        """
    mov.b32 %r3, 0; $L1: setp.ge.u32 %p1, %r3, %r1; @%p1 bra $L2; add.s32 %r3, %r3, 1; bra.uni $L1;
    $L2: bar.sync 0; shfl.sync.idx.b32 %r3, %r3, 7, 31, -1;"""
        + STORE
    )
    assert run(body, np.zeros(128, np.uint32), threads=64, blocks=1, results=64).tolist() == [7] * 32 + [39] * 32


# Words go through shared memory to the thread at the other end of the block: 64 threads.
MIRROR = LOAD + """
    mov.b32 %r4, smem; shl.b32 %r5, %r1, 2; add.s32 %r6, %r4, %r5; sub.s32 %r7, 252, %r5; add.s32 %r7, %r4, %r7;
    st.shared.b32 [%r6], %r2; bar.sync 0; ld.shared.b32 %r3, [%r7]; bar.sync 0; st.shared.b32 [%r6], %r3;
    """ + STORE  # fmt: skip
COPY = (
    """
    mov.b32 %r4, smem; shl.b32 %r5, %r1, 2; add.s32 %r6, %r4, %r5; sub.s32 %r7, 252, %r5; add.s32 %r7, %r4, %r7;
    setp.ge.u32 %p1, %r1, 60; selp.b32 %r8, 0, 4, %p1;
    cp.async.ca.shared.global [%r6], [%rd4], 0x4, %r8; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    ld.shared.b32 %r3, [%r7];"""
    + STORE
)
ATOMIC = LOAD + "mov.b32 %r3, %r2; red.global.gpu.relaxed.add.u32 [%rd2], %r3; ret; }"
GIVEN = np.arange(1, 65, dtype=np.uint32)


def test_intact_programs_have_no_fault() -> None:
    assert run(MIRROR, GIVEN, threads=64, shared=256).tolist() == GIVEN[::-1].tolist()
    assert run(COPY, GIVEN[:60], 64, threads=64, shared=256).tolist() == [0] * 4 + GIVEN[:60][::-1].tolist()
    assert run(ATOMIC, GIVEN, 1, threads=64, blocks=3).tolist() == [3 * 64 * 65 // 2]


@pytest.mark.parametrize(
    ("program", "line", "instead", "message", "sizes"),
    [
        (MIRROR, "bar.sync 0; ld", "ld", "read of a place: another warp wrote it, with no barrier", {}),
        (MIRROR, "bar.sync 0; st", "st", "write of a place: another warp read it, with no barrier", {}),
        (MIRROR, "[%r7]", "[%r7+4]", "outside of the block's shared memory", {}),
        (MIRROR, "st.global.b32 [%rd5]", "st.global.b32 [%rd5+4]", "outside of every tensor", {}),
        (MIRROR, "ld.global.b32 %r2, [%rd4]", "ld.global.b32 %r2, [%rd4+2]", "no multiple of 4", {}),
        (MIRROR, "ld.global.b32 %r2, [%rd4]", "ld.global.v2.b32 {%r2, %r9}, [%rd4]", "no multiple of 8", {}),
        (MIRROR, "[%rd5], %r3", "[%rd2], %r1", "two threads write to one place at once", {}),
        (MIRROR, "[%rd5], %r3", "[%rd2], 5", "two threads write to one place at once", {}),  # though the same
        (MIRROR, "[%r6], %r2", "[%r4], %r2", "two threads write to one place at once", {}),
        (MIRROR, "", "", "another block wrote it", {"blocks": 2}),
        (MIRROR, "st.shared.b32 [%r6], %r3", "ld.global.b32 %r9, [%rd2]", "write of a place: another warp read", {}),
        (MIRROR, "bar.sync 0; ld", "bar.sync 0; setp.lt.u32 %p1, %r1, 40; @%p1 bar.sync 0; ld",
         "a barrier that not all threads of the block reach", {}),
        (MIRROR, "bar.sync 0; ld", "setp.lt.u32 %p1, %r1, 40; @%p1 redux.sync.add.s32 %r9, %r2, -1; ld",
         "without some of a warp's lanes", {}),
        (COPY, "cp.async.wait_group 0;", "", "an asynchronous copy is on the way", {}),
        (COPY, "cp.async.wait_group 0;", "cp.async.wait_group 1;", "an asynchronous copy is on the way", {}),
        (COPY, "cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_group 0; cp.async.commit_group;",
         "an asynchronous copy is on the way", {}),
        (COPY, "bar.sync 0;", "", "another warp wrote it, with no barrier", {}),
        (COPY, "%r1, 60", "%r1, 61", "outside of every tensor", {}),
        (COPY, "cp.async.wait_group 0; bar.sync 0;\n    ld.shared.b32 %r3, [%r7]", "mov.b32 %r3, 0",
         "the kernel ends with an asynchronous copy", {}),
        (ATOMIC, "ret", "ld.global.b32 %r3, [%rd2]; ret", "atomics add to it", {"results": 1}),
        (ATOMIC, "red.", "st.global.b32 [%rd2], %r3; red.", "two threads write to one place", {"results": 1}),
    ],
)  # fmt: skip
def test_each_check_bites(
    program: str, line: str, instead: str, message: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert line in program
    monkeypatch.setattr(machine, "THREADS", 64)  # blocks one after the other
    given = GIVEN[:60] if program == COPY else GIVEN
    arguments = {"results": 64, "threads": 64, "shared": 256} | sizes
    with pytest.raises(Fault, match=re.escape(message)):
        run(program.replace(line, instead), given, **arguments)


@pytest.mark.parametrize(("stride", "wavefronts", "sectors"), [(4, 1, 4), (8, 2, 8), (32, 8, 32), (128, 32, 32)])
def test_traffic(stride: int, wavefronts: int, sectors: int) -> None:
    """A warp's words, `stride` bytes apart, in shared and in global memory."""
    counts = Counts()
    body = f"""mul.lo.u32 %r4, %r1, {stride}; st.shared.b32 [%r4], %r1; mul.wide.u32 %rd3, %r1, {stride};
    add.s64 %rd4, %rd1, %rd3; ld.global.b32 %r3, [%rd4]; ret; }}"""
    run(body, np.zeros(8 * stride, np.uint32), shared=32 * stride, counts=counts)
    expected = {"wavefronts": wavefronts, "ideal wavefronts": 1, "sectors": sectors, "requests": 1}
    assert dict(counts.traffic) == expected
    assert counts.issued["st.shared"] == counts.issued["ld.global"] == counts.issued["mov"] == 1
