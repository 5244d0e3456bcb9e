"""Compare what `toolstorm hazards` says of each capture with what the program that made it knows.

Arguments: the toolstorm binary and the folder with captures and `expectations.json`. Prints one line a capture; fails
when a clean variant has hazards, a mistake is not named, a capture that went wrong on the card has none, or the exporter
changed what the program allocates.
"""

import json
import os
import subprocess
import sys


def verdict(binary, folder, case):
    if "error" in case:
        return "error", case["error"].strip().splitlines()[-1]
    run = subprocess.run(
        [binary, "--json", "hazards", os.path.join(folder, case["file"])], capture_output=True, text=True, check=False
    )
    if run.returncode not in (0, 1):
        return "error", run.stderr.strip()
    graph = json.loads(run.stdout)["graphs"][0]
    found = {(h["first"]["kernel"], h["second"]["kernel"]) for h in graph["hazards"]}
    text = f"{len(graph['hazards'])} hazards, {case.get('wrong_steps', 0):.0%} of steps wrong"
    if not case["pairs"] and found:
        return "false", f"{text}: {sorted(found)}"
    if case.get("layout_as_without_exporter") is False:
        return "moved", f"{text}: the exporter changed what the capture allocates"
    named = [any(a in x and b in y for x, y in found) for a, b in case["pairs"]]
    if case["pairs"] and not any(named) and (case["batch"] > 1 or case.get("wrong_steps")):
        return "missed", f"{text}: none of {case['pairs']} in {sorted(found)}"
    if case.get("wrong_steps") and not found:
        return "missed", text
    return "ok", text + ("" if all(named) else f"; not here: {[p for p, n in zip(case['pairs'], named) if not n]}")


def main():
    binary, folder = sys.argv[1:]
    with open(os.path.join(folder, "expectations.json"), encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    bad = 0
    for case in cases:
        outcome, text = verdict(binary, folder, case)
        bad += outcome != "ok"
        print(f"{outcome:6} {case['file']:34} {text}")
    print(f"{len(cases) - bad} of {len(cases)} as expected")
    sys.exit(min(bad, 1))


main()
