"""Compile every kernel for a device that is not there: run as a script, with the compute capability (such as 90).

A driver that only knows its name stands in for the real one, and launches stop behind the compilation. Prints the
name of each compiled kernel and the bytes of its binary.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from spectoolkit.datatypes import Dense, PointMass, Uniforms
from spectoolkit.functional.noise import Role


class AbsentDevice:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch(kernel, grid):
    def compile_only(*arguments, **options):
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        print(kernel.fn.__name__, len(compiled.asm["cubin"]))

    return compile_only


def main() -> None:
    triton.runtime.driver.set_active(AbsentDevice(int(sys.argv[1])))
    JITFunction.__getitem__ = launch
    from spectoolkit.kernels import noise, reduce
    from spectoolkit.kernels.coupled import coupled
    from spectoolkit.kernels.rejection_and_block import DraftLogits, block, rejection

    size, num_drafts, vocab_size = 2, 4, 8192
    logits = torch.zeros(size, num_drafts + 1, vocab_size, dtype=torch.bfloat16)
    temperature = torch.ones(size, dtype=torch.float64)
    tokens, lengths = torch.zeros(size, num_drafts, dtype=torch.int64), torch.full((size,), num_drafts)
    uniforms = Uniforms(torch.zeros(size, num_drafts).double(), torch.zeros(size, num_drafts + 1).double())
    dense = Dense(torch.zeros(size, num_drafts, vocab_size))
    keys = torch.zeros(size, num_drafts + 1, dtype=torch.int64)
    given = (logits, temperature, tokens, lengths)
    rejection(*given, PointMass(), uniforms)
    rejection(*given, DraftLogits(logits[:, :-1], temperature), uniforms)
    block(*given, dense, uniforms)
    coupled(*given, keys)
    if "all" in sys.argv:
        rejection(*given, dense, uniforms)
        block(*given, PointMass(), uniforms)
        block(*given, DraftLogits(logits[:, :-1], temperature), uniforms)
        for dtype in (torch.float32, torch.float16):
            rejection(logits.to(dtype), *given[1:], dense, uniforms)
        rejection(logits[:, :2], temperature, tokens[:, :1], lengths, dense, uniforms)  # K = 1 is specialised
        block(logits[:, :1, :5], temperature, tokens[:, :0], lengths, dense, uniforms)
    reduce.reduce_rows(logits[0], temperature.repeat(3)[:5], logits[0], torch.ones(5, 16), torch.zeros(5).long())
    noise.uniforms(lengths, lengths, lengths, 5, Role.EMIT)
    noise.exponentials(keys, 2048)


if __name__ == "__main__":
    main()
