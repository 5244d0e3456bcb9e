#!/usr/bin/env python3
"""The two studies of docs/SIMULATION.md, launch by launch on the virtual GPU.

    benches/studies.py seeds BINARY results/seeds.csv [--seeds 1-20]
    benches/studies.py sensitivity BINARY results/sensitivity.csv [--seeds 1-5]
    benches/studies.py table results/sensitivity.csv

`seeds` runs every arm of scenarios/seed-table.toml once a seed; `sensitivity` runs three of them with each constant of
the cost model at 0.8 and 1.25 of its value. Both append a row a launch to the CSV and leave out what it already holds, so
that they can be stopped and started again. Each takes an hour or more of two cores. `table` prints what `sensitivity` found:
corrupted sessions, mean over seeds, and the range of the baseline's.
"""
import argparse
import csv
import json
import os
import re
import subprocess
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ARMS = {"baseline": "", "persistent-logits": 'TOOLSTORM_PERSISTENT_LOGITS = "1"', "ge-diff": 'TOOLSTORM_GE_DIFF = "1"'}
FACTORS = ["0.8", "1.25"]
MEASURED = {"sessions": "sessions_judged", "corrupted_sessions": "sessions_corrupted", "race_hits": "race_hits",
            "virtual_step_us": "virtual_step_us", "overlap_share": "overlap_share"}


def source(path):
    with open(os.path.join(HERE, path), encoding="utf-8") as file:
        return file.read()


def constants():
    """The names that TOOLSTORM_COST takes, as the source lists them."""
    text = source("src/device/sim/cost.rs")
    machine = re.search(r"let machine = \[(.*?)\];", text, re.S).group(1)
    classes = re.search(r"const CLASSES.*?= \[(.*?)\n\];", text, re.S).group(1)
    return re.findall(r'"(\w+)"', machine) + re.findall(r'(?:bf16|fp8)\(\s*"(\w+)"', classes)


def seeds_matrix():
    """The table, each arm once."""
    return re.sub(r"repetitions = \d+\n", "", source("scenarios/seed-table.toml"))


def sensitivity_matrix(constant, factor):
    arms = "".join(f'[[arm]]\nname = "{arm}"\nexpect = "report"\nenv = {{ {env} }}\n' for arm, env in ARMS.items())
    return ('name = "sensitivity"\nscenario = "agentic"\nsessions = 80\nconcurrency = 64\norder = "interleaved"\n'
            'lockstep = true\n[target]\nkind = "builtin"\n'
            f'[env]\nSGLANG_DSV4_BF16_INDEX_K = "1"\nTOOLSTORM_COST = "{constant}={factor}"\n{arms}')


def launch(binary, seed, matrix):
    """Runs a matrix and returns what MEASURED names, a row an arm."""
    with tempfile.TemporaryDirectory() as folder:
        path, summary = os.path.join(folder, "matrix.toml"), os.path.join(folder, "summary.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(matrix)
        run = subprocess.run([binary, "matrix", path, "--quiet", "--jobs", "1", "--seed",
                              str(seed), "--output-dir", folder, "--export-json", summary], capture_output=True, text=True)
        # 1: the gate failed, as that of a zero arm with a corrupted session should.
        if run.returncode not in (0, 1):
            raise RuntimeError(f"seed {seed}: exit code {run.returncode}: {run.stderr[-500:]}\n{matrix}")
        with open(summary, encoding="utf-8") as file:
            arms = json.load(file)["arms"]
    # A launch that was suspended for longer than its limits of silence loses sessions and is no function of its seeds.
    for arm in arms:
        if arm["sessions_judged"] < arm["sessions_planned"]:
            raise RuntimeError(f"seed {seed}, {arm['name']}: {arm['sessions_judged']} of {arm['sessions_planned']} sessions "
                               f"judged: {arm['infra_first']}\n{matrix}")
    return [[seed, arm["name"]] + [round(arm[name], 4) for name in MEASURED.values()] for arm in arms]


def table(path):
    """Prints a row for each constant that changes a launch; those that change none are named below."""
    launches = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found = int(row["corrupted_sessions"]), int(row["race_hits"])
            launches.setdefault((row["constant"], row["factor"]), {})[row["seed"], row["arm"]] = found
    # Graphs are launched one at a time and on an idle machine, so this constant changes nothing.
    shipped = launches.get(("graph_launch", "0.8"))
    if shipped is None:
        raise SystemExit(f"{path}: no rows of graph_launch at 0.8, which stand for the shipped constants; run sensitivity first")

    def figures(at):
        def of(arm):
            return [corrupted for (_, name), (corrupted, _) in launches[at].items() if name == arm]
        if at not in launches:
            return [""] * len(ARMS)
        means = [f"{sum(of(arm)) / len(of(arm)):.1f}" for arm in ARMS]
        return [f"{means[0]} ({min(of('baseline'))}–{max(of('baseline'))})", *means[1:]]

    print("| constant | 0.8: baseline | persistent | ge-diff | 1.25: baseline | persistent | ge-diff |\n|---|--:|--:|--:|--:|--:|--:|")
    same = []
    for name in dict.fromkeys(constant for constant, _ in launches):
        found = [launches.get((name, factor), {}) for factor in FACTORS]
        if all(shipped.get(key) == value for launch in found for key, value in launch.items()):
            same.append(name)
        else:
            print("|", " | ".join([f"`{name}`", *(figure for factor in FACTORS for figure in figures((name, factor)))]), "|")
    print("\nAs shipped:", " | ".join(figures(("graph_launch", "0.8"))))
    print("The same corrupted sessions and race hits as shipped in every launch:", ", ".join(f"`{name}`" for name in same))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = parser.add_subparsers(dest="study", required=True)
    for study, seeds in (("seeds", "1-20"), ("sensitivity", "1-5")):
        arguments = studies.add_parser(study)
        arguments.add_argument("binary")
        arguments.add_argument("csv")
        arguments.add_argument("--seeds", default=seeds, help="first-last")
        arguments.add_argument("--workers", type=int, default=os.cpu_count())
        if study == "sensitivity":
            arguments.add_argument("--constants", help="only these, separated by commas")
    studies.add_parser("table").add_argument("csv")
    options = parser.parse_args()
    if options.study == "table":
        table(options.csv)
        return
    first, last = options.seeds.split("-")
    if options.study == "seeds":
        keys, cells, matrix = [], [()], seeds_matrix
    else:
        names = constants()
        wanted = options.constants.split(",") if options.constants else names
        if unknown := [name for name in wanted if name not in names]:
            parser.error(f"no constant of the cost model: {', '.join(unknown)}; there are {', '.join(names)}")
        cells = [(constant, factor) for constant in wanted for factor in FACTORS]
        keys, matrix = ["constant", "factor"], sensitivity_matrix
    held = set()
    if os.path.exists(options.csv):
        with open(options.csv, encoding="utf-8", newline="") as file:
            held = {(*(row[key] for key in keys), int(row["seed"])) for row in csv.DictReader(file)}
    else:
        with open(options.csv, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*keys, "seed", "arm", *MEASURED])
    every = [(*cell, seed) for seed in range(int(first), int(last) + 1) for cell in cells]
    left, lock, failed = iter([cell for cell in every if cell not in held]), threading.Lock(), []

    def work():
        while not failed:
            with lock:
                at = next(left, None)
            if at is None:
                return
            begun = time.monotonic()
            try:
                rows = launch(options.binary, at[-1], matrix(*at[:-1]))
            except RuntimeError as error:
                failed.append(f"{at}: {error}")
                return
            with lock, open(options.csv, "a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([*at[:-1], *row] for row in rows)
                print(*at, [row[3] for row in rows], f"{time.monotonic() - begun:.1f} s", flush=True)

    workers = [threading.Thread(target=work) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
