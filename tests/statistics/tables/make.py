"""Writes the reference tables beside this file.

    pip install scipy==1.17.1 statsmodels==0.15.0
    python make.py

Every row holds the arguments and the value that the named SciPy or statsmodels function returned.
"""

import csv
import pathlib

import scipy
import statsmodels
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import confint_proportions_2indep

HERE = pathlib.Path(__file__).parent


def write(name, header, rows):
    with open(HERE / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in rows:
            writer.writerow([repr(float(x)) if isinstance(x, float) else x for x in row])


COUNTS = [
    (0, 1), (1, 1), (0, 80), (1, 80), (4, 80), (12, 80), (40, 80), (79, 80), (80, 80), (0, 299), (1, 299),
    (0, 2995), (3, 2995), (150, 1000), (17, 20000), (9000, 20000), (40, 100000), (50000, 100000), (7, 1000000),
]
CONFIDENCES = [0.9, 0.95, 0.99]


def one_arm():
    for events, trials in COUNTS:
        for confidence in CONFIDENCES:
            test = stats.binomtest(events, trials)
            exact = test.proportion_ci(confidence, method="exact")
            wilson = test.proportion_ci(confidence, method="wilson")
            upper = stats.binomtest(events, trials, alternative="less").proportion_ci(confidence, method="exact").high
            yield (events, trials, confidence, float(exact.low), float(exact.high), float(upper),
                   float(wilson.low), float(wilson.high))


PAIRS = [
    (0, 80, 0, 80), (12, 80, 0, 80), (12, 80, 3, 80), (1, 80, 0, 80), (5, 80, 4, 80), (80, 80, 0, 80), (80, 80, 80, 80),
    (56, 70, 48, 80), (9, 10, 3, 10), (0, 10, 0, 20), (5, 56, 0, 29), (3, 300, 9, 280), (30, 200, 51, 230), (2, 5, 3, 7),
    (0, 12, 9, 15), (15, 1000, 40, 1000), (1, 240, 6, 240),
]


def two_arms():
    for e1, n1, e2, n2 in PAIRS:
        for confidence in CONFIDENCES:
            low, high = confint_proportions_2indep(e1, n1, e2, n2, method="newcomb", compare="diff", alpha=1 - confidence)
            yield e1, n1, e2, n2, confidence, float(low), float(high)


def exact():
    for e1, n1, e2, n2 in PAIRS:
        table = [[e1, e2], [n1 - e1, n2 - e2]]
        fisher = float(stats.fisher_exact(table).pvalue)
        # n is the number of points of the Sobol search over the nuisance parameter.
        boschloo = float(stats.boschloo_exact(table, n=2048).pvalue)
        yield e1, n1, e2, n2, fisher, boschloo


FAMILIES = [
    [0.01, 0.04, 0.03, 0.005], [0.5], [0.02, 0.02, 0.02], [0.9, 0.0001, 0.3, 0.049, 0.05, 0.012], [1.0, 1.0, 0.0],
]


def holm():
    for p_values in FAMILIES:
        yield " ".join(map(repr, p_values)), " ".join(repr(float(x)) for x in multipletests(p_values, method="holm")[1])


def normal():
    for p in [1e-9, 0.001, 0.025, 0.05, 0.2, 0.5, 0.8, 0.95, 0.975, 0.999]:
        yield p, float(stats.norm.ppf(p))


write("one_arm", "events trials confidence exact_low exact_high upper wilson_low wilson_high".split(), one_arm())
write("newcombe", "events_1 trials_1 events_2 trials_2 confidence low high".split(), two_arms())
write("exact", "events_1 trials_1 events_2 trials_2 fisher boschloo".split(), exact())
write("holm", "p_values adjusted".split(), holm())
write("normal", "p quantile".split(), normal())
(HERE / "versions.txt").write_text(f"scipy {scipy.__version__}\nstatsmodels {statsmodels.__version__}\n")
