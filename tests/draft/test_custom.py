"""A drafter of one's own: as an object, a class, a function, `module:Class`, or a name a package offers."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

import outrider
from outrider import LLM, Draft, Drafter, DrafterContext, OutriderError
from outrider.draft import names
from outrider.draft.names import Part, check_parts, load_source, make_custom, parse_draft
from outrider.errors import InvalidRequest, ModelNotFound
from tests.load.tiny import write_folder

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
CONTEXT = DrafterContext(tokenizer=None, vocab=96, context=64, eos_ids=(1,), max_sequences=4)  # type: ignore[arg-type]
TINY = dict(kernels="torch", threads=1, max_sequences=4, cache_bytes=1 << 22, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_folder(made)
    return made


@pytest.fixture
def trigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module of the docs page, where `import` finds it."""
    [code] = re.findall(r"```python\n# file: trigram.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "trigram.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import trigram

    yield trigram
    monkeypatch.delitem(__import__("sys").modules, "trigram")


class Own(Drafter):
    def propose(self, sequences, draft_plans):
        return [Draft()] * len(sequences)


def offered(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = {name: EntryPoint(name, value, names.GROUP) for name, value in values.items()}
    monkeypatch.setattr(names, "offered_drafters", lambda: points)


def made(draft: object) -> tuple[str, Drafter]:
    [part] = parse_draft(draft)
    return make_custom(load_source(part), CONTEXT)


def answer(llm: LLM, **options):
    return llm.generate([[5, 6, 7] * 8], temperature=0, max_tokens=20, ignore_eos=True, **options)[0]


def test_the_drafter_of_the_docs_guesses_and_changes_nothing(folder: Path, trigram) -> None:
    with LLM(folder, draft="lookup+trigram:Trigram", **TINY) as llm:
        assert llm.drafter == "lookup+trigram"
        plain = answer(llm, speculation="off")
        first = answer(llm, speculation={"drafter": "trigram", "depth": 4})
        guessed = answer(llm, speculation={"drafter": "trigram", "depth": 4})  # it remembers the first
        both = answer(llm, speculation=4)
    assert first.token_ids == guessed.token_ids == both.token_ids == plain.token_ids
    assert plain.stats.drafted == 0 < guessed.stats.accepted and both.stats.drafted > 0


def test_every_way_to_give_one(trigram, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, three="trigram:Trigram")
    for draft in (trigram.Trigram(), trigram.Trigram, lambda: trigram.Trigram(), "trigram:Trigram"):
        name, drafter = made(draft)
        assert name == "trigram" and isinstance(drafter, trigram.Trigram)
    assert made("three")[0] == "three"
    assert [part.kind for part in parse_draft("lookup+three+early_exit:2+./three")] == [
        *("lookup", "own", "early_exit", "model")
    ]


def test_who_asks_for_the_context_gets_it() -> None:
    class ByName(Own):
        def __init__(self, context=None):
            self.given = context

    class Required(Own):
        def __init__(self, target):
            self.given = target

    class Depth(Own):
        def __init__(self, depth=3):
            self.given = depth

    assert made(ByName)[1].given is made(Required)[1].given is CONTEXT  # type: ignore[attr-defined]
    assert made(Depth)[1].given == 3  # type: ignore[attr-defined]
    assert made(lambda context: ByName(context.vocab))[1].given == 96  # type: ignore[attr-defined]


def test_names() -> None:
    class SuffixTreeDrafter(Own):
        pass

    class Named(Own):
        name = "mine-2"

    assert made(SuffixTreeDrafter)[0] == "suffix_tree" and made(Named())[0] == "mine-2"


class LookupDrafter(Own):
    pass


class Plus(Own):
    name = "a+b"


class NoStop:
    def start(self, sequence): ...
    def propose(self, sequences, draft_plans): ...
    def accept(self, sequence, draft, verdict): ...


class OneBet(Own):
    def propose(self, sequences):
        return []


class Fails(Own):
    def __init__(self):
        raise RuntimeError("no table of words")


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (LookupDrafter, "the name 'lookup' is taken: give LookupDrafter another `name`"),
        (Plus(), "not 'a\\+b'"),
        (NoStop, "NoStop is not a drafter: it has no stop"),
        (NoStop(), "NoStop is not a drafter: it has no stop"),
        (lambda: NoStop(), "NoStop is not a drafter: it has no stop"),
        (object(), "object is not a drafter: it has no start and no propose and no accept and no stop"),
        (OneBet, r"propose of OneBet must take \(sequences, draft_plans\)"),
        (OneBet(), r"propose of OneBet must take \(sequences, draft_plans\)"),
        (Fails, "Fails could not be made: RuntimeError: no table of words"),
        ("no_such_module:Class", "there is no module 'no_such_module'.*PYTHONPATH"),
        ("outrider.nowhere:Class", "there is no module 'outrider.nowhere'"),
        ("outrider:Draftr", "outrider has no 'Draftr'; did you mean 'Drafter'"),
        ("trigram:Trigram.deeper", "trigram has no 'deeper'"),
    ],
)
def test_what_is_wrong_is_named(draft: object, says: str, trigram) -> None:
    with pytest.raises(OutriderError, match=says):
        made(draft)


def test_a_module_that_fails_is_told_apart_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_inside.py").write_text("import not_installed_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OutriderError, match=r"cannot be imported: ModuleNotFoundError.*not_installed_at_all"):
        made("fails_inside:Any")
    offered(monkeypatch, broken="fails_inside:Any")
    with pytest.raises(OutriderError, match=r"the drafter 'broken' \(fails_inside:Any\) cannot be imported"):
        made("broken")


def test_an_incomplete_drafter_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(InvalidRequest, match="no stop"):
        LLM("/no/such/model", draft=NoStop)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("lokup", "no drafter 'lokup'; did you mean 'lookup'"),
        ("medusa", "no drafter 'medusa': heads of that kind are not read here"),
        ("lm", "'lm' is what a smaller model is called once it is open; give the model itself"),
        ("eagle", "give the head's folder or hub id"),
        ("ngram", "here that is 'lookup'"),
        ("Prompt-Lookup", "here that is 'lookup'"),
        ("lookup+", "joins names"),
        ("lookup+none", "joins names"),
        ("wholly-unknown", "known: .*early_exit.*\nOr a model that drafts: a folder"),
        ("./nowhere", "no drafter './nowhere'"),
    ],
)
def test_a_name_that_can_mean_nothing_is_refused_at_once(draft: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=says):
        check_parts(parse_draft(draft), tmp_path)
    with pytest.raises(OutriderError, match=says):
        LLM("/no/such/model", draft=draft)


def test_what_may_be_somewhere_is_looked_for_later(tmp_path: Path) -> None:
    for name in (
        "auto",
        "none",
        "early_exit:9",
        "smollm2-135m",
        "org/name",
        "org/name:file.gguf",
        str(tmp_path),
    ):
        check_parts(parse_draft(name), tmp_path)


def test_built_in_names_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, lookup="x:Y", lm="x:Y", eagle="x:Y")
    assert parse_draft("lookup+lm") == (Part("lookup", "lookup"), Part("model", "lm"))
    with pytest.raises(ModelNotFound):
        check_parts(parse_draft("eagle"), Path("/nowhere"))


def test_what_installed_packages_offer_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trigram
) -> None:
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{names.GROUP}]\nthree = trigram:Trigram\n")
    assert made("three")[0] == "three"


def test_an_entry_point_may_be_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports the backport of importlib.metadata gets its entry points from then on."""
    point = SimpleNamespace(name="mine", value="somewhere:Own", load=lambda: Own)
    monkeypatch.setattr(names, "offered_drafters", lambda: {"mine": point})
    name, drafter = made("mine")
    assert name == "mine" and isinstance(drafter, Own)


def test_the_door_is_exported() -> None:
    assert {"Draft", "Drafter", "DrafterContext"} <= set(outrider.__all__)
