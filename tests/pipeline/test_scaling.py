"""Power laws found again in points that were made from them, or worked out by hand."""

import pytest

from rlhf.pipeline.scaling import (
    Evaluation,
    PowerLaw,
    by_parameters,
    by_tokens,
    fit_power_law,
    frontier,
    study,
)


def test_points_of_a_known_power_law_give_back_its_exponent_and_constant() -> None:
    law = fit_power_law([(n, (8.8e13 / n) ** 0.076) for n in (1e4, 1e5, 3e6)])  # Kaplan's own for parameters
    assert law is not None
    assert law.exponent == pytest.approx(0.076)
    assert 10**law.log10_constant == pytest.approx(8.8e13)
    assert law.r_squared == pytest.approx(1)
    assert law(2e7) == pytest.approx((8.8e13 / 2e7) ** 0.076)


def test_the_line_of_points_off_it_is_that_of_least_squares() -> None:
    # log10: (0, 2), (1, 2), (2, 1), (3, 1). Slope: sum of (x - 1.5)(y - 1.5) = -0.75 - 0.25 - 0.25 - 0.75 = -2,
    # over 5; intercept 1.5 + 0.4 * 1.5 = 2.1. The line misses by 0.1, 0.3, 0.3, 0.1: 0.2 of a variance sum of 1.
    law = fit_power_law([(1, 100), (10, 100), (100, 10), (1000, 10)])
    assert law is not None
    assert law.exponent == pytest.approx(0.4)
    assert law.log10_constant == pytest.approx(2.1 / 0.4)
    assert law.r_squared == pytest.approx(0.8)


def test_a_constant_too_large_for_a_float_is_no_trouble() -> None:
    law = fit_power_law([(1e4, 2.0), (1e5, 1.999), (1e6, 1.998)])
    assert law is not None
    assert law.log10_constant > 308
    assert law(1e5) == pytest.approx(1.999, abs=1e-6)


@pytest.mark.parametrize(
    "points",
    [[], [(1, 2), (10, 1)], [(1, 2), (1, 3), (10, 1)], [(1, 2), (10, 2), (100, 2)], [(1, 1), (10, 2), (99, 3)]],
)
def test_there_is_no_law_of_two_points_nor_of_a_loss_that_does_not_fall(points: list[tuple[float, float]]) -> None:
    assert fit_power_law(points) is None


def test_of_variants_of_about_one_size_the_best_counts() -> None:
    assert by_parameters([(100, 3.0), (119, 2.5), (110, 2.8), (500, 2.0), (121, 2.7)]) == [
        (119, 2.5), (121, 2.7), (500, 2.0),
    ]  # fmt: skip


def test_the_data_curve_is_of_one_size_in_order_of_tokens() -> None:
    seen = [Evaluation("a", 9, 200, 3.0), Evaluation("a", 9, 100, 4.0), Evaluation("b", 5, 100, 1.0)]
    assert by_tokens(seen, 9) == [(100, 4.0), (200, 3.0)]


def test_the_data_curve_is_of_the_best_run_of_its_size_and_ends_where_that_was_best() -> None:
    seen = [Evaluation("a", 9, tokens, loss) for tokens, loss in ((100, 4.0), (200, 3.0), (300, 3.5))]
    seen += [Evaluation("too fast", 9, tokens, loss) for tokens, loss in ((100, 8.0), (200, 9.0), (300, 9.5))]
    assert by_tokens(seen, 9) == [(100, 4.0), (200, 3.0)]


def test_the_frontier_keeps_what_no_smaller_compute_beats() -> None:
    seen = [
        Evaluation("a", 10, 10, 5.0),  # 600 operations
        Evaluation("a", 10, 20, 4.0),  # 1200
        Evaluation("a", 10, 30, 3.9),  # 1800: beaten by the larger model, which spent as much
        Evaluation("a", 30, 10, 3.8),  # 1800
        Evaluation("a", 30, 20, 3.85),  # 3600: worse than before
        Evaluation("a", 30, 30, 3.0),  # 5400
    ]
    assert frontier(seen) == [(600, 5.0), (1200, 4.0), (1800, 3.8), (5400, 3.0)]


def test_a_study_fits_all_three_from_three_sizes_on() -> None:
    def loss(parameters: float, tokens: float) -> float:
        return parameters**-0.1 * 50 * tokens**-0.2

    sizes = [(n, loss(n, 8000)) for n in (1000, 2000, 4000)]
    seen = [Evaluation(str(n), n, d, loss(n, d)) for n in (1000, 2000, 4000) for d in (2000, 4000, 8000)]
    found = study(sizes, seen)
    assert found is not None
    fits = {name: part["fit"] for name, part in found.items()}
    assert all(isinstance(fit, PowerLaw) for fit in fits.values())
    assert fits["parameters"].exponent == pytest.approx(0.1)
    assert fits["tokens"].exponent == pytest.approx(0.2)
    assert found["tokens"]["points"] == [(d, loss(4000, d)) for d in (2000, 4000, 8000)]
    assert study(sizes[:2], seen) is None
