"""`outrider bench --what quality`: what fewer bits cost, format by format, on the user's prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from outrider.cli.measure import Progress, Report, described, say_loading
from outrider.cli.output import note, open_llm
from outrider.cli.tasks import TaskRow, task_ids
from outrider.errors import InvalidRequest, suggest
from outrider.settings import KV_CACHE, WEIGHTS, Settings

KV = "kv-"  # before a format of the KV cache

if TYPE_CHECKING:
    from outrider.bench.quality import Reference


def formats_of(text: str | None, against: str | None, settings: Settings) -> tuple[str, list[str]]:
    """The reference's format, and those to compare with it: by default all others of the device; where another file
    is the reference, the format of --weights. `kv-int8` is a format of the KV cache beside the reference's weights.
    """
    from outrider.engine.memory import runs_on_gpu

    device = "cuda" if runs_on_gpu(settings) else "cpu"
    widest, *fewer = KV_CACHE[device]
    caches = [KV + name for name in fewer]
    known = ("auto", *WEIGHTS[device], *caches)
    every = [settings.weights] if against else [name for name in WEIGHTS[device] if name != widest] + caches
    names = text.split(",") if text else every
    for name in names:
        if name not in known:
            raise InvalidRequest(
                f"unknown format {name!r:.40}{suggest(name, known)}; on this device: {', '.join(known)}",
                "formats",
            )
    return widest, list(dict.fromkeys(names))


def refuse_unused(**given: object) -> None:
    """Flags of speed measurements that --what quality would ignore."""
    for name, value in given.items():
        if value:
            raise InvalidRequest(f"--what quality measures no speed; leave out --{name}", name)


def bench_quality(
    model: str,
    against: str | None,
    formats: str | None,
    rows: Mapping[str, list[TaskRow]],
    tokens: int,
    settings: Settings,
    json_file: str | None,
) -> None:
    """One model is loaded at a time."""
    from outrider.bench.quality import quality_table

    widest, names = formats_of(formats, against, settings)
    report = Report("quality", json_file)
    source = against or model
    stages = {"reference": 2.0, **dict.fromkeys(names, 1.0)}
    with Progress(stages) as progress, tempfile.TemporaryFile() as file:
        made = _reference(source, widest, rows, tokens, settings, report, file, progress)
        report |= {"model": model, "reference_model": source, "reference": widest}
        report |= {"reference_perplexity": made.perplexity, "formats": {}}
        for name in names:
            report["formats"][name] = _measured(model, name, widest, made, settings, progress)
            report.keep()
    for line in quality_table(report):
        note(line)
    report.deliver()


def _reference(
    source: str,
    weights: str,
    rows: Mapping[str, list[TaskRow]],
    tokens: int,
    settings: Settings,
    report: Report,
    file: BinaryIO,
    progress: Progress,
) -> Reference:
    from outrider.bench.quality import make_reference

    say_loading(source)
    with open_llm(source, "none", replace(settings, weights=weights)) as llm:
        report |= described(llm)
        prompts = [ids for some in task_ids(llm, rows, tokens).values() for ids in some]
        return make_reference(llm, prompts, tokens, file, progress.of("reference"))


def _measured(
    model: str, name: str, widest: str, made: Reference, settings: Settings, progress: Progress
) -> dict[str, float]:
    from outrider.bench.quality import measure_quality

    kept = name.removeprefix(KV)
    own = replace(settings, weights=name if kept == name else widest)
    if kept != name:
        own = replace(own, kv_cache_dtype=kept)
    with open_llm(model, "none", own) as llm:
        tell = progress.of(name)
        return measure_quality(llm, made, lambda _, done: tell(f"format {name}", done))
