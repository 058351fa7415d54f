"""A report from end to end: what it says is what the fit says, and nothing it is given can run."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whence
from report_examples import EVIL, Example, draw, fitted, kinds, pictures, rows, texts, trained
from whence.influence.explanation import VERDICTS
from whence.trust.checks import MEANING

VOID = {"meta", "img", "input", "br"}
KINDS = kinds()


class Reader(HTMLParser):
    """Collects elements, attributes and text, and insists that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def unpack(data: dict[str, Any], name: str, kind: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(data["arrays"][name]), kind)


@pytest.fixture(scope="module")
def example() -> Example:
    return pictures()


@pytest.fixture(scope="module")
def page(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example.write(tmp_path_factory.mktemp("report") / "report.html")


def test_verdicts_are_those_of_explain_and_causes_those_of_attribute(example: Example, page: Path) -> None:
    data, told = data_of(page), example.tracer.explain(example.x)
    shares = example.tracer.attribute(example.x, top=6)
    codes = unpack(data, "verdict", "u1")
    assert tuple(VERDICTS[code] for code in codes) == told.verdicts
    assert data["traced"] == list(range(len(example.x)))
    assert [[example for example, _ in pairs] for pairs in data["check"]] == shares.hec3.index.tolist()
    assert [[example for example, _ in pairs] for pairs in data["near"]] == shares.ho.index.tolist()
    words = read(page).words
    uncertain = len(codes) - told.verdicts.count("confident")
    assert f"{uncertain} of {len(codes)} predictions are uncertain" in words
    assert 0 < uncertain < len(codes)


def test_variances_and_answers_are_those_of_predict(example: Example, page: Path) -> None:
    data, u = data_of(page), example.tracer.predict(example.x)
    np.testing.assert_allclose(unpack(data, "ho"), u.ho.sum(1), rtol=1e-6)
    np.testing.assert_allclose(unpack(data, "hec3"), u.hec3.sum(1), rtol=1e-6)
    answers = u.mean.argmax(1)
    assert unpack(data, "answer", "<i4").tolist() == answers.tolist()
    assert unpack(data, "truth", "<i4").tolist() == example.y.tolist()
    assert unpack(data, "right", "u1").tolist() == (answers == example.y).long().tolist()
    deviation = u.hec3.gather(1, answers[:, None]).squeeze(1).sqrt() / 2  # the code of a class is 2 above the others'
    np.testing.assert_allclose(unpack(data, "half"), 1.959964 * deviation, rtol=1e-5)


def test_the_range_of_a_belief_is_the_delta_method_s(tmp_path: Path) -> None:
    example = KINDS["categorical"]
    u, data = example.tracer.predict(example.x), data_of(example.write(tmp_path / "report.html"))
    best = u.mean.argmax(1, keepdim=True)
    np.testing.assert_allclose(unpack(data, "confidence"), u.mean.softmax(1).amax(1), rtol=1e-5)
    deviation = u.probability_covariance().diagonal(dim1=1, dim2=2).gather(1, best).squeeze(1).sqrt()
    np.testing.assert_allclose(unpack(data, "half"), 1.959964 * deviation, rtol=1e-5)


def test_shares_of_the_first_cause_by_hand(example: Example, page: Path) -> None:
    """HeC3 is a sum over training examples of |J F^-1 J_i^T u_i|^2; its largest term over the sum."""
    found = example.tracer.attribute(example.x[:3], top=1)
    for place in range(3):
        index, share = data_of(page)["check"][place][0]
        assert index == int(found.hec3.index[place, 0])
        assert share == pytest.approx(float(found.hec3.share[place, 0]), abs=1e-4)


def test_labels_to_check_are_wrong_ones(page: Path) -> None:
    """In the example half of the cedars among the training examples, the even ones, are labelled birch."""
    asked = [int(one) for one in re.findall(r"Check the label of training example (\d+)", read(page).words)]
    assert len(asked) >= 3
    assert sum(one % 3 == 2 for one in asked) >= 0.8 * len(asked)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_task(name: str, tmp_path: Path) -> None:
    example = KINDS[name]
    with_targets = example.write(tmp_path / "with.html")
    without = example.tracer.report(tmp_path / "without.html", example.x)
    data = data_of(with_targets)
    kinds = {"numbers": "regression", "a number": "regression", "several answers": "multilabel"}
    kind = kinds.get(name, "classification")
    assert (data["kind"], data["m"]) == (kind, 25)
    assert "Quality" in read(with_targets).words
    assert "none of these inputs has a label" in read(without).words
    assert "none of these inputs has a label" not in read(with_targets).words
    assert "right" in data["arrays"]
    assert not {"right", "truth"} & set(data_of(without)["arrays"])


def test_right_and_wrong_of_one_output(tmp_path: Path) -> None:
    for name in ("plus and minus", "yes or no"):
        example = KINDS[name]
        data = data_of(example.write(tmp_path / "report.html"))
        wanted = (example.tracer.predict(example.x).mean > 0) == (example.y > 0)
        assert unpack(data, "right", "u1").tolist() == wanted.long().squeeze(1).tolist()


def test_shows_hostile_text_and_never_runs_it(tmp_path: Path) -> None:
    def write(text: str) -> Reader:
        example = texts(extra=text)
        index = pd.MultiIndex.from_tuples([(text, text)], names=[text, text])
        sections = {text: [text, {text: text}, (text, pd.DataFrame({text: [text]}, index))]}
        ids = [f"{number}{text}" for number in range(len(example.x))]
        options: dict[str, Any] = {"title": text, "about": [text], "sections": sections, "ids": ids}
        return read(example.write(tmp_path / "report.html", **options))

    plain, evil = write("word"), write(EVIL)
    assert evil.tags.count("script") == plain.tags.count("script") == 2
    assert sorted(set(evil.tags)) == sorted(set(plain.tags)), "text became elements"
    assert evil.words.count(EVIL) > 60
    assert not any(name.startswith("on") or name == "style" for _, name, _ in evil.attributes)


def test_sections_of_one_s_own(tmp_path: Path) -> None:
    example = KINDS["a number"]
    grouped = pd.DataFrame({"a": ["0.1", "0.2"]}, pd.MultiIndex.from_tuples([("g", "r"), ("h", "r")]))
    plain = pd.DataFrame({"b": [7]}, index=pd.Index(["r"], name="rows"))
    content = ["A paragraph.", {"term": "its meaning"}, ("Grouped", grouped), ("Plain", plain)]
    path = example.write(tmp_path / "report.html", sections={"Mine": content})
    html = "".join(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    part = html[html.index('<h2 id="more-1-title">Mine</h2>') : html.index('<section id="how"')]
    for wanted in (
        "<p>A paragraph.</p>",
        "<dt>term</dt><dd><span>its meaning</span></dd>",
        '<th scope="rowgroup" colspan="2">h</th></tr><tr><th scope="row">r</th><td>0.2</td></tr></tbody>',
        '<tr><th scope="col">rows</th><th scope="col">b</th></tr></thead><tbody><tr><th scope="row">r</th><td>7</td>',
    ):
        assert wanted in part


def test_asks_for_nothing_from_outside(page: Path) -> None:
    found = read(page).attributes
    links = [value for _, name, value in found if name in ("src", "href", "action", "data", "poster", "srcset")]
    assert len(links) > 20
    assert all(link.startswith(("data:image/", "#")) for link in links)
    policy = next(value for tag, name, value in found if (tag, name) == ("meta", "content") and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    ids = [value for _, name, value in found if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link for link in links if link.startswith("#")} <= {f"#{one}" for one in ids}


def test_a_loader_gives_the_same_page_as_one_batch(example: Example, page: Path, tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(example.x, example.y), batch_size=50, shuffle=True)
    again = example.tracer.report(tmp_path / "again.html", loader, **example.options)
    assert data_of(again)["traced"] == data_of(page)["traced"]
    np.testing.assert_allclose(unpack(data_of(again), "hec3"), unpack(data_of(page), "hec3"), rtol=1e-5)
    once = iter([(example.x[:9], example.y[:9]), (example.x[9:20], example.y[9:20])])
    assert data_of(example.tracer.report(tmp_path / "once.html", once, **example.options))["m"] == 20


def test_few_are_traced_where_few_are_asked_for(example: Example, tmp_path: Path) -> None:
    path = example.write(tmp_path / "report.html", traced=40)
    data = data_of(path)
    assert len(data["traced"]) == len(data["check"]) == len(data["test"]) == 40
    assert "40 of 150 predictions were traced" in read(path).words
    exact = np.array([VERDICTS.index(one) for one in example.tracer.explain(example.x).verdicts])
    codes = unpack(data, "verdict", "u1")
    assert (codes == exact).all()


def test_rows_of_a_table(tmp_path: Path) -> None:
    path = rows().write(tmp_path / "report.html")
    data = data_of(path)
    assert data["columns"] == ["size", "age", "town"]
    cells, odd, first = data["test"]["0"]
    assert cells[0] == "9"
    assert first[0] == 0
    assert odd[0] == [0, "larger than every training value"]
    assert [2, "never seen in training"] in data["test"]["1"][1]
    assert "Unusual: size 9, larger than every training value" in read(path).words


def test_tokens_of_texts_are_marked_by_their_weights(tmp_path: Path) -> None:
    example = texts()
    plain, train = example.options["texts"]
    example.options["texts"] = [*plain[:-1], [("so ", 0.0), ("ironic", -2.0), (" film", 1.0)]], train
    data = data_of(example.write(tmp_path / "report.html"))
    said = ["".join(word for word, _ in data["test"][str(number)]) for number in range(len(plain))]
    assert said == [
        *((text if len(text) <= 600 else f"{text[:600]} …") or " " for text in plain[:-1]),
        "so ironic film",
    ]
    assert data["test"][str(len(plain) - 1)] == [["so ", 0.0], ["ironic", 1.0], [" film", 0.5]]


def test_inputs_speak_for_themselves(tmp_path: Path) -> None:
    example = rows()
    data = data_of(example.tracer.report(tmp_path / "report.html", example.x))
    assert (data["form"], data["columns"]) == ("row", ["x0", "x1", "x2"])


def test_inputs_that_are_not_shown(tmp_path: Path) -> None:
    """Rows of the test inputs alone, and inputs that are neither images nor short rows."""
    example = rows()
    data = data_of(example.write(tmp_path / "report.html", table=example.options["table"][0]))
    assert len(data["test"]) == len(example.x)
    assert all(shown[4] is None for shown in data["train"].values())
    x = draw(30, 80, seed=2)
    tracer = fitted(nn.Linear(80, 1).double(), x, x[:, :1])
    path = tracer.report(tmp_path / "report.html", x[:5])
    assert (data_of(path)["form"], data_of(path)["test"]) == ("none", {})
    assert "All 5 predictions were traced to training examples." in read(path).words


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"names": ["one"]}, "expected 3 names, one for each of the classes, got 1"),
        ({"images": torch.zeros(7, 8, 8)}, "expected 150 images, one for each test input, got 7"),
        ({"images": torch.zeros(150, 5, 8, 8)}, "expected images of shape"),
        ({"texts": ["a"]}, "expected one of images, texts and table, got several"),
        ({"ids": ["a"]}, "expected 150 ids, one for each prediction, got 1"),
        ({"level": 95}, "expected a level between 0 and 1"),
        ({"traced": 0}, "expected traced to be a whole number"),
    ],
)
def test_says_what_is_wrong(example: Example, tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(whence.WhenceError, match=re.escape(complaint)):
        example.write(tmp_path / "report.html", **options)


def test_says_which_fits_no_report_can_be_made_of(tmp_path: Path) -> None:
    x, labels = torch.randn(30, 4, 3).double(), torch.randint(0, 2, (30, 4))
    tokens = whence.fit(nn.Linear(3, 2).double().eval(), [(x, labels)], "categorical", progress=False)
    with pytest.raises(whence.InputError, match="one output vector for each example, got one with outputs at several"):
        tokens.report(tmp_path / "report.html", x)
    many = nn.Linear(3, 70).double().eval()
    sketched = whence.fit(many, [(x[:, 0], labels[:, 0])], "categorical", progress=False)
    with pytest.raises(whence.InputError, match="a fit of all 70 outputs, got one of 17 mixtures"):
        sketched.report(tmp_path / "report.html", x[:, 0])


def test_says_where_the_folder_is_missing(example: Example, tmp_path: Path) -> None:
    with pytest.raises(whence.InputError, match=r"expected a folder that exists, got .*nowhere"):
        example.write(tmp_path / "nowhere" / "page.html")


def test_a_loader_that_changes_its_order_is_refused(example: Example, tmp_path: Path) -> None:
    class Changing:
        """Gives the same batches backwards every other time."""

        turn = False

        def __iter__(self) -> Any:
            batches = [(example.x[:120], example.y[:120]), (example.x[120:], example.y[120:])]
            self.turn = not self.turn
            return iter(batches if self.turn else batches[::-1])

    with pytest.raises(whence.LoaderError, match="expected the same inputs in every pass"):
        example.tracer.report(tmp_path / "report.html", Changing(), images=example.options["images"])


def test_tells_how_far_the_fit_is_to_be_trusted(tmp_path: Path) -> None:
    example = rows()
    without = read(example.write(tmp_path / "without.html")).words
    assert MEANING[str(example.tracer.diagnostics["trust"])][1:] in without
    assert "tracer" not in without
    trust = example.tracer.trust(example.x, sample=3)
    words = read(example.write(tmp_path / "with.html", trust=trust)).words
    for check in trust:
        assert check.words.replace("`", "") in words
    assert words.index(MEANING[trust.level][1:]) < words.index("What would help most")


def test_names_of_arguments_are_shown_as_code(tmp_path: Path) -> None:
    example = KINDS["numbers"]
    trust = example.tracer.trust(example.x, sample=3)
    assert any("`ridge`" in check.words for check in trust.not_fine)
    path = example.write(tmp_path / "report.html", trust=trust)
    assert "Check that <code>ridge</code> is" in path.read_text(encoding="utf-8")
    assert "`" not in read(path).words


def test_the_code_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "report.md", "exec"), names)
    assert data_of(tmp_path / "report.html")["names"] == ["price"]


def test_scores_and_unknown_labels_are_counted(tmp_path: Path) -> None:
    example = rows()
    targets = example.y.clone()
    targets[:4] = float("nan")
    words = " ".join(read(example.tracer.report(tmp_path / "some.html", (example.x, targets))).words.split())
    known = len(targets) - 4
    assert f"({known} predictions with a label, 4 without)" in words
    error = (example.tracer.predict(example.x).mean[4:] - targets[4:]).square().mean()
    r2 = 1 - float(error / targets[4:].var(correction=0))
    assert f"R2 {r2:.2f} · RMSE {float(error.sqrt()):.3g}" in words


def test_how_many_labels_are_wrong_in_all_is_said_or_why_not(tmp_path: Path) -> None:
    """Labels of two separate classes, a tenth of them wrong."""
    x, generator = draw(300, 2, seed=5), torch.Generator().manual_seed(0)
    x[:, 0] += torch.where(torch.arange(300) % 2 == 0, -4.0, 4.0)
    y = (x[:, 0] > 0).long()
    wrong = torch.rand(300, generator=generator) < 0.1
    y[wrong] = 1 - y[wrong]
    model = trained(nn.Linear(2, 2).double(), x, y, nn.functional.cross_entropy)
    tracer = fitted(model, x, y, "categorical")
    test = draw(40, 2, seed=6)
    words = " ".join(read(tracer.report(tmp_path / "many.html", test)).words.split())
    said = re.search(r"About ([\d.]+) % of labels look wrong \(([\d.]+) to ([\d.]+) %\)", words)
    assert said is not None
    assert float(said[2]) <= 100 * float(wrong.double().mean()) <= float(said[3])
    few = fitted(model, x[:100], y[:100], "categorical")
    words = " ".join(read(few.report(tmp_path / "few.html", test)).words.split())
    assert "100 labels that the model has not seen are too few" in words


def test_no_more_than_chance_is_said_first(tmp_path: Path) -> None:
    """Predictions at the training inputs themselves."""
    example = rows()
    x = example.tracer.problem.batches.loader[0][0]
    found = example.tracer.explain(x).verdicts
    uncertain = sum(verdict != "confident" for verdict in found)
    words = " ".join(read(example.tracer.report(tmp_path / "own.html", x)).words.split())
    said = f"{uncertain} of {len(x)} predictions are called uncertain. Chance alone would give about "
    assert (said in words) == (0 < uncertain <= 0.0975 * len(x))


def test_an_undecided_model_is_a_reason_of_its_own(example: Example, tmp_path: Path) -> None:
    seen = set()
    for one in (example, KINDS["yes or no"], rows()):
        found = one.tracer.explain(one.x)
        undecided = bool((found.undecided & found.scarce).any())
        seen.add(undecided)
        words = " ".join(read(one.write(tmp_path / "report.html")).words.split())
        assert "because there is little training data near them" in words
        assert ("near them or the model is undecided" in words) == undecided
    assert seen == {False, True}


def test_an_input_that_cannot_be_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    example = rows()
    test, train = example.options["table"]
    wrong = {**test, "size": [1e9, *test["size"].tolist()[1:]]}
    data = data_of(path := example.write(tmp_path / "wrong.html", table=(wrong, train)))
    assert "far from every training value" in data["impossible"]["0"]
    assert np.frombuffer(base64.b64decode(data["arrays"]["verdict"]), "u1")[0] == 4
    words = " ".join(read(path).words.split())
    assert "1 input cannot be right: check it first" in words
    assert "Collect and label inputs like prediction 0 " not in words
