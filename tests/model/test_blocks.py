"""Products with weights in blocks of few bits: the C kernels against their torch twin, and each row, bit by bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.errors import BadCheckpoint, OutOfMemory
from outrider.load.quants import FORMATS, Blocks, Format
from outrider.model.decoder import make_kernels
from outrider.model.kernels import build
from outrider.model.kernels.reference_blocks import fma
from outrider.model.weights import KERNEL_FORMATS, stacked
from tests.model.families import NEEDS_COMPILER
from tests.tiny import tiny_config

pytestmark = NEEDS_COMPILER
HERE, KERNEL_FILES = Path(__file__).parent, Path(build.__file__).parent
FORMS = {form.name: form for form in FORMATS.values() if form.name in KERNEL_FORMATS}
SCALES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
COUNTS = [*range(1, 10), 16, 33, 128]
by_format = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(form: Format, rows: int, columns: int, seed: int = 0) -> Blocks:
    """Every bit random, except that scales are small and finite."""
    generator = torch.Generator().manual_seed(seed)
    count = columns // form.values
    raw = torch.randint(0, 256, (rows * count, form.bytes), generator=generator, dtype=torch.uint8)
    if form.name == "MXFP4":
        raw[:, 0] = torch.randint(100, 130, (len(raw),), generator=generator, dtype=torch.uint8)
        raw[::7, 0] = (
            torch.arange(len(raw[::7])).fmod(120).byte()
        )  # numbers so small that they are not normal, too
        return Blocks("a tensor", form, raw.view(rows, -1), columns)
    for at in SCALES.get(form.name, (0,)):
        half = (torch.randn(len(raw), generator=generator) / 64).half()
        raw[:, at : at + 2] = half.view(-1, 1).view(torch.uint8)
    return Blocks("a tensor", form, raw.view(rows, -1), columns)


@pytest.fixture(scope="module")
def pair(kernel_folder: Path) -> tuple[Any, Any]:
    config = tiny_config()
    return tuple(make_kernels(config, 64, 2, kernel_folder, kind) for kind in ("c", "torch"))


@by_format
@pytest.mark.parametrize("outputs", [1, 16, 49])
@pytest.mark.parametrize("columns", [256, 768])
def test_products_have_the_bits_of_the_twin(pair: Any, form: Format, outputs: int, columns: int) -> None:
    weight, bias, x = random_blocks(form, outputs, columns), noise(outputs, seed=1), noise(7, columns, seed=2)
    x[3] *= 1e4
    x[4], x[5, :40] = 0, 1e-33  # blocks without a scale
    made = [kernels.linear(kernels.pack_linear(weight, bias), x) for kernels in pair]
    assert torch.equal(*made)
    # Rounding the activations to 8 bits moves a product by about 1 % of what its terms amount to.
    exact, size = x @ weight.float().T + bias, x.abs() @ weight.float().abs().T + bias.abs()
    assert ((made[0] - exact).abs() <= 0.02 * size).all()


def test_an_odd_number_of_panels_and_blocks(pair: Any) -> None:
    """As in gpt-oss, whose hidden size of 2,880 is 90 blocks."""
    weight, x = random_blocks(FORMS["MXFP4"], 24, 2880), noise(7, 2880, seed=2)
    assert torch.equal(*(kernels.linear(kernels.pack_linear(weight), x) for kernels in pair))


@by_format
def test_a_row_has_the_same_bits_among_any_others_and_with_any_threads(
    pair: Any, form: Format, kernel_folder: Path
) -> None:
    weight, x = random_blocks(form, 81, 512), noise(128, 512, seed=3)
    alone_kernels = make_kernels(tiny_config(), 64, 1, kernel_folder, "c")
    packed = [kernels.pack_linear(weight) for kernels in (alone_kernels, pair[0])]
    alone = torch.cat([alone_kernels.linear(packed[0], row) for row in x.split(1)])
    for count in COUNTS:
        assert torch.equal(pair[0].linear(packed[1], x[:count]), alone[:count]), count
        assert torch.equal(pair[0].linear(packed[1], x[-count:]), alone[-count:]), count


@by_format
def test_embed_reads_rows(pair: Any, form: Format) -> None:
    weight, ids = random_blocks(form, 49, 256), torch.tensor([0, 48, 15, 16, 17, 48])
    made = [kernels.embed(kernels.pack_linear(weight), ids) for kernels in pair]
    assert torch.equal(*made)
    assert torch.allclose(made[0], weight.float()[ids], rtol=1e-6, atol=1e-6)


def test_a_matrix_of_several_formats(pair: Any) -> None:
    """As a layer's queries, keys and values may be."""
    x, bias = noise(9, 256, seed=4), noise(80, seed=5)
    parts = [
        random_blocks(FORMS["Q4_K"], 32, 256),
        noise(16, 256),
        random_blocks(FORMS["Q6_K"], 32, 256, seed=6),
    ]
    whole = stacked(parts)
    made = [kernels.linear(kernels.pack_linear(whole, bias), x) for kernels in pair]
    assert torch.equal(made[0][:, :32], made[1][:, :32]) and torch.equal(made[0][:, 48:], made[1][:, 48:])
    apart = [pair[0].linear(pair[0].pack_linear(part), x) for part in parts]
    assert torch.equal(made[0], torch.cat(apart, 1) + bias)
    same = [random_blocks(FORMS["Q4_0"], 16, 256, seed=i) for i in range(3)]
    assert isinstance(stacked(same), Blocks)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
@by_format
def test_a_scale_that_is_no_number_is_refused_by_name(pair: Any, form: Format, bits: int) -> None:
    weight = random_blocks(form, 20, 512)
    at = SCALES.get(form.name, (0,))[-1]
    if form.name == "MXFP4":
        bits = 255
    weight.raw.view(-1, form.bytes)[-1, at : at + 2] = torch.tensor(
        [bits & 255, bits >> 8], dtype=torch.uint8
    )
    for kernels in pair:
        with pytest.raises(BadCheckpoint, match="'a tensor' is corrupt"):
            kernels.pack_linear(weight)


@by_format
def test_any_bytes_are_refused_by_name_or_multiplied_alike(pair: Any, form: Format) -> None:
    x, refused = noise(3, 256, seed=8), 0
    for seed in range(12):
        weight, generator = random_blocks(form, 20, 256, seed=seed), torch.Generator().manual_seed(seed)
        raw = weight.raw.view(-1)
        edits = len(raw) * seed // 6
        at = torch.randint(0, len(raw), (edits,), generator=generator)
        raw[at] = torch.randint(0, 256, (edits,), generator=generator, dtype=torch.uint8)
        if form.name == "MXFP4":
            powers = raw.view(-1, form.bytes)[:, 0]
            powers[(powers > 150) & (powers < 255)] = 150  # larger ones overflow, each kernel in its own way
        made = []
        for kernels in pair:
            try:
                made.append(kernels.linear(kernels.pack_linear(weight), x))
            except BadCheckpoint as problem:
                assert "'a tensor' is corrupt" in str(problem)
        refused += not made
        assert not made or (torch.equal(*made) and made[0].isfinite().all())
    assert 0 < refused < 12


@by_format
def test_every_variant_that_this_processor_runs_has_the_same_bits(pair: Any, form: Format) -> None:
    weight, x = random_blocks(form, 49, 512), noise(9, 512, seed=7)
    kernels, variants = pair[0], pair[0].variants()
    assert kernels.variant == variants[0] and variants[-1] == "portable"
    packed = kernels.pack_linear(weight)
    expected = kernels.linear(packed, x)
    try:
        for name in variants:
            kernels.choose(name)
            assert kernels.variant == name
            assert torch.equal(kernels.linear(packed, x), expected), name
    finally:
        kernels.choose(variants[0])


def test_a_product_without_memory_is_an_error(pair: Any) -> None:
    """Not the end of the process. No machine has the memory for so many rows."""
    kernels, rows, columns = pair[0], 2**31 - 1, 2**26
    weight = kernels.pack_linear(random_blocks(FORMS["Q8_0"], 16, 256))
    with pytest.raises(OutOfMemory, match="no memory is left for a step's activations"):
        kernels.lib.outrider_linear(weight.matrix, None, None, rows, 16, columns, 1, None)


def compiled(command: list[str], file: Path, *flags: str) -> Path:
    """tests/model/variants.c, which compares all variants with the portable kernels."""
    flags = ("-std=gnu11", "-ffp-contract=fast", "-fopenmp-simd", f"-I{KERNEL_FILES}", *flags)
    subprocess.run(
        [*command, *flags, "-o", str(file), "-lm", "-lpthread"], check=True, capture_output=True, text=True
    )
    return file


def test_avx512_kernels_have_the_same_bits(pair: Any, tmp_path: Path) -> None:
    """With the instructions written out in C: they can be compared on any machine."""
    built = str(pair[0].lib._name)
    fake = f"-I{HERE / 'avx512'}"
    flags = (fake, "-DAVX512_IN_C=1", str(HERE / "variants.c"), built, f"-Wl,-rpath,{Path(built).parent}")
    program = compiled([build.compiler()], tmp_path / "compare", *flags)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "avx512-vnni in C\n")


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "names"), [("aarch64", "i8mm sdot"), ("x86_64", "avx2")])
def test_other_processors_in_an_emulator(machine: str, names: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="no cross-compiler: pip install ziglang")
    if (emulator := shutil.which(f"qemu-{machine}")) is None:
        pytest.skip(f"no qemu-{machine}, which the package qemu-user has")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl", "-O1"]
    files = (str(HERE / "variants.c"), *map(str, (*KERNEL_FILES.glob("blocks*.c"), KERNEL_FILES / "team.c")))
    program = compiled(command, tmp_path / "compare", *files)
    done = subprocess.run([emulator, "-cpu", "max", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [*names.split(), "portable"])


def test_fma_rounds_once() -> None:
    """Where rounding the product first, or to float64 first, gives another number."""
    a, b = torch.tensor([1 + 2.0**-12, 1 + 2.0**-23]), torch.tensor([1 + 2.0**-12, 1 - 2.0**-23])
    c = torch.tensor([-1 - 2.0**-11, 2.0**60])
    assert fma(a, b, c).tolist() == [2.0**-24, 2.0**60]
    # 1 + 2^-24 + 2^-100: halfway between two floats but for the last term, which float64 loses
    tie = fma(torch.tensor([2.0**-50]), torch.tensor([2.0**-50]), torch.tensor([1.0]))
    assert tie.item() == 1.0
    above = fma(torch.tensor([1 + 2.0**-23]), torch.tensor([2.0**-24]), torch.tensor([1.0]))
    assert above.item() == 1 + 2.0**-23
