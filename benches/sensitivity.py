#!/usr/bin/env python3
"""How sharply the table reacts: every constant of the cost model at 0.8 and 1.25 of its value, three arms, some seeds.

    benches/sensitivity.py BINARY CSV [--seeds 1-5] [--workers 2] [--sessions 80]

Appends a row a launch to CSV and leaves out what it already holds, so that it can be stopped and started again. One
launch takes some 17 s of one core: all of it, 1050 launches, is an afternoon's work for two.
"""
import argparse
import csv
import json
import os
import re
import subprocess
import tempfile
import threading

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ARMS = {"baseline": "", "persistent-logits": 'TOOLSTORM_PERSISTENT_LOGITS = "1"', "ge-diff": 'TOOLSTORM_GE_DIFF = "1"'}
COLUMNS = ["constant", "factor", "seed", "arm", "sessions", "corrupted_sessions", "race_hits", "virtual_step_us"]


def constants():
    """The names that TOOLSTORM_COST takes, as the source lists them."""
    with open(os.path.join(HERE, "src/device/sim/cost.rs"), encoding="utf-8") as file:
        source = file.read()
    machine = re.search(r"let machine = \[(.*?)\];", source, re.S).group(1)
    classes = re.search(r"const CLASSES.*?= \[(.*?)\n\];", source, re.S).group(1)
    return re.findall(r'"(\w+)"', machine) + re.findall(r'(?:bf16|fp8)\(\s*"(\w+)"', classes)


def matrix(constant, factor, sessions):
    arms = "".join(f'[[arm]]\nname = "{arm}"\nexpect = "report"\nenv = {{ {env} }}\n' for arm, env in ARMS.items())
    return (f'name = "sensitivity"\nscenario = "agentic.toml"\nsessions = {sessions}\nconcurrency = 64\nlockstep = true\n'
            f'[target]\nkind = "builtin"\n[env]\nSGLANG_DSV4_BF16_INDEX_K = "1"\nTOOLSTORM_COST = "{constant}={factor}"\n{arms}')


def cell(binary, constant, factor, seed, sessions):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(HERE, "scenarios/agentic.toml"), encoding="utf-8") as source:
            scenario = source.read()
        for name, text in (("agentic.toml", scenario), ("matrix.toml", matrix(constant, factor, sessions))):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        summary = os.path.join(folder, "summary.json")
        run = subprocess.run([binary, "matrix", os.path.join(folder, "matrix.toml"), "--quiet", "--jobs", "1", "--seed",
                              str(seed), "--output-dir", folder, "--export-json", summary], capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{constant} x {factor}, seed {seed}: exit code {run.returncode}: {run.stderr[-500:]}")
        with open(summary, encoding="utf-8") as file:
            arms = json.load(file)["arms"]
    return [[constant, factor, seed, arm["name"], arm["sessions_judged"], arm["sessions_corrupted"], arm["race_hits"],
             round(arm["virtual_step_us"], 1)] for arm in arms]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("csv")
    parser.add_argument("--seeds", default="1-5")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=80)
    options = parser.parse_args()
    first, last = (int(seed) for seed in options.seeds.split("-"))
    held = set()
    if os.path.exists(options.csv):
        with open(options.csv, encoding="utf-8", newline="") as file:
            held = {(row["constant"], row["factor"], int(row["seed"])) for row in csv.DictReader(file)}
    else:
        with open(options.csv, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(COLUMNS)
    cells = [(c, f, s) for s in range(first, last + 1) for c in constants() for f in ("0.8", "1.25")]
    left, lock = iter([cell for cell in cells if cell not in held]), threading.Lock()
    failed = []

    def work():
        while not failed:
            with lock:
                at = next(left, None)
            if at is None:
                return
            try:
                rows = cell(options.binary, *at, options.sessions)
            except RuntimeError as error:
                failed.append(str(error))
                return
            with lock, open(options.csv, "a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
                print(*at, [row[5] for row in rows], flush=True)

    workers = [threading.Thread(target=work) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
