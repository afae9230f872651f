import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn import metrics as reference

from pmae.evaluate.metrics import _ranking, confusion, evaluate_scores, per_class, weighted_metrics
from pmae.intervals import Interval
from pmae.results import METRICS


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def case(count: int, classes: int, seed: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(classes, size=count - classes)])
    scores = softmax(rng.normal(size=(count, classes)) + 1.5 * np.eye(classes)[labels])
    if ties:
        scores = rng.multinomial(5, scores / scores.sum(1, keepdims=True)) / 5
    return scores, labels


def sklearn_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    predicted = scores.argmax(1)
    binary = scores.shape[1] == 2
    return {
        "accuracy": reference.accuracy_score(labels, predicted),
        "balanced_accuracy": reference.balanced_accuracy_score(labels, predicted),
        "macro_auc": reference.roc_auc_score(labels, scores[:, 1] if binary else scores, multi_class="ovr"),
        "macro_f1": reference.f1_score(labels, predicted, average="macro"),
    }


@pytest.mark.parametrize(("classes", "ties"), [(2, False), (2, True), (5, False), (5, True), (11, False)])
def test_values_equal_scikit_learn(classes: int, ties: bool) -> None:
    scores, labels = case(200, classes, classes, ties)
    found = evaluate_scores(scores, labels, resamples=10)
    for name, value in sklearn_metrics(scores, labels).items():
        assert found[name].value == pytest.approx(value, abs=1e-12), name


def test_one_resampling_serves_all_metrics_and_equals_scikit_learn_on_the_resampled_rows() -> None:
    scores, labels = case(80, 3, 0, ties=True)
    rows = np.random.default_rng(4).integers(80, size=(80, 6))
    weights = np.stack([np.bincount(rows[:, r], minlength=80) for r in range(6)], axis=1).astype(np.int32)
    rankings = [_ranking(scores[:, c], labels == c) for c in range(3)]
    found = weighted_metrics(scores.argmax(1), labels, rankings, weights)
    for r in range(6):
        for name, value in sklearn_metrics(scores[rows[:, r]], labels[rows[:, r]]).items():
            assert found[name][r] == pytest.approx(value, abs=1e-12), name


def test_table_and_confusion_equal_scikit_learn() -> None:
    scores, labels = case(150, 4, 2)
    table = confusion(scores.argmax(1), labels, 4)
    assert (table == reference.confusion_matrix(labels, scores.argmax(1))).all()
    precision, recall, _, support = reference.precision_recall_fscore_support(labels, scores.argmax(1))
    for c, row in enumerate(per_class(table, "abcd")):
        assert (row.precision, row.recall) == pytest.approx((precision[c], recall[c]))
        assert row.support == support[c]


def test_interval_of_the_accuracy_is_about_the_binomial_one_and_follows_the_seed() -> None:
    scores, labels = case(400, 3, 5)
    found = evaluate_scores(scores, labels, resamples=2000)["accuracy"]
    share = found.value
    half = 1.96 * (share * (1 - share) / 400) ** 0.5
    assert (found.low, found.high) == pytest.approx((share - half, share + half), abs=0.01)
    assert evaluate_scores(scores, labels, 50, seed=1) == evaluate_scores(scores, labels, 50, seed=1)
    assert evaluate_scores(scores, labels, 50, seed=1) != evaluate_scores(scores, labels, 50, seed=2)


def test_interval_contains_the_truth_about_95_times_in_100() -> None:
    rng, inside = np.random.default_rng(0), 0
    for trial in range(200):
        labels = rng.integers(2, size=150)
        right = rng.random(150) < 0.7
        scores = np.eye(2)[np.where(right, labels, 1 - labels)]
        found = evaluate_scores(scores, labels, resamples=200, seed=trial)["accuracy"]
        inside += found.low <= 0.7 <= found.high
    assert 0.89 <= inside / 200 <= 0.99


def test_a_class_missing_from_the_test_part_is_left_out_of_the_averages() -> None:
    scores, labels = case(90, 4, 3)
    rows = labels != 3
    found = evaluate_scores(scores[rows], labels[rows], resamples=20)
    recalls = [(scores[rows][labels[rows] == c].argmax(1) == c).mean() for c in range(3)]
    aucs = [reference.roc_auc_score(labels[rows] == c, scores[rows][:, c]) for c in range(3)]
    assert found["balanced_accuracy"].value == pytest.approx(np.mean(recalls))
    assert found["macro_auc"].value == pytest.approx(np.mean(aucs))
    assert per_class(confusion(scores[rows].argmax(1), labels[rows], 4), "abcd")[3].recall is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_single_class_has_no_auc_and_no_nan(count: int) -> None:
    found = evaluate_scores(np.tile([0.3, 0.7], (count, 1)), np.ones(count, int), resamples=5)
    assert found["macro_auc"] == Interval()
    expected = binomtest(count, count).proportion_ci(method="wilson")
    assert (found["accuracy"].low, found["accuracy"].high) == pytest.approx((expected.low, 1.0), abs=1e-4)
    wrong = evaluate_scores(np.tile([0.7, 0.3], (count, 1)), np.ones(count, int), resamples=5)["accuracy"]
    assert (wrong.low, wrong.high) == pytest.approx((0.0, 1 - expected.low), abs=1e-4)


def test_constant_scores_have_an_auc_of_one_half() -> None:
    found = evaluate_scores(np.full((6, 3), 1 / 3), np.array([0, 0, 1, 1, 2, 2]), resamples=30)
    assert found["macro_auc"] == Interval(0.5, 0.5, 0.5)
    assert found["accuracy"].value == pytest.approx(1 / 3)


def test_two_samples_of_two_classes() -> None:
    found = evaluate_scores(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1]), resamples=20)
    assert all(found[name].value == 1.0 for name in METRICS)


@pytest.mark.parametrize("all_right", [False, True])
def test_intervals_over_groups_of_copies_are_those_of_the_originals(all_right: bool) -> None:
    """Ten copies of every image say no more than one: as images alone they would claim to."""
    scores, labels = case(60, 3, 1)
    scores = np.eye(3)[labels] if all_right else scores
    groups = np.tile(np.arange(60), 10)
    alone, copied = evaluate_scores(scores, labels, 200), (np.tile(scores, (10, 1)), np.tile(labels, 10))
    for name, found in evaluate_scores(*copied, 200, groups=groups).items():
        assert found.low == pytest.approx(alone[name].low)
        assert found.high == pytest.approx(alone[name].high)
    naive, known = evaluate_scores(*copied, 200)["accuracy"], alone["accuracy"]
    assert None not in (naive.low, naive.high, known.low, known.high)
    assert naive.high - naive.low < 0.5 * (known.high - known.low)  # type: ignore[operator]
