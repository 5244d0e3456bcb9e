"""`toolstorm hazards --launch` on a server of PyTorch's graphs, with the mistakes and without: exit codes and pairs.

Arguments: the toolstorm binary, and a folder for what it prints and what was captured.
"""

import json
import os
import socket
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# What the report of each variant names: parts of both kernels' names.
EXPECTED = {
    "mistakes": (1, [("index_logits", ""), ("store_kv", "")]),
    "hold": (0, []),
    "record-stream": (0, []),
}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def launched(binary, folder, variant):
    """What differs from the expectation, in words."""
    code, pairs = EXPECTED[variant]
    port = free_port()
    command = [binary, "--json", "hazards", "--launch", "--ready", f"http://127.0.0.1:{port}/health"]
    command += ["--captures-dir", os.path.join(folder, variant), "--", "python3", os.path.join(HERE, "server.py")]
    run = subprocess.run([*command, variant, str(port)], capture_output=True, text=True, timeout=120, check=False)
    with open(os.path.join(folder, f"{variant}.json"), "w", encoding="utf-8") as file:
        file.write(run.stdout)
    with open(os.path.join(folder, f"{variant}.log"), "w", encoding="utf-8") as file:
        file.write(run.stderr)
    if run.returncode != code:
        return f"exit code {run.returncode} instead of {code}: {run.stderr.strip().splitlines()[-1:]}"
    report = json.loads(run.stdout)
    graphs = {graph["name"]: graph["hazards"] for graph in report["graphs"]}
    if len(graphs) != 7 or not all(name.startswith("bs=") for name in graphs):
        return f"graphs {sorted(graphs)}"
    for name, hazards in graphs.items():
        found = {(h["first"]["kernel"], h["second"]["kernel"]) for h in hazards}
        missing = [pair for pair in pairs if not any(pair[0] in a and pair[1] in b for a, b in found)]
        # One row's tensors are so small that nothing else need take their bytes.
        if missing and name != "bs=1":
            return f"{name}: none of {missing} in {sorted(found)}"
    return ""


def main():
    binary, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    bad = 0
    for variant in EXPECTED:
        difference = launched(binary, folder, variant)
        bad += bool(difference)
        print(f"{'wrong' if difference else 'ok':6}{variant}: {difference or f'exit code {EXPECTED[variant][0]}'}", flush=True)
    sys.exit(min(bad, 1))


main()
