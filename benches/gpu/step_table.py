"""A table of a decode step's ops from ncu's durations: what each takes, what it must move, and its floor.

The bytes are an op's operands and its charged matrix, one byte an element, each once; the floor is their time at copy
bandwidth, which a launch of a few kilobytes cannot come near. Usage: step_table.py GB_A_SECOND NCU.csv, from
  ncu --clock-control none --cache-control none --csv --metrics gpu__time_duration.sum,launch__grid_size \\
    CONFORMANCE --ignored --exact engine::steps_for_a_profiler > NCU.csv
"""
import csv
import sys

HIDDEN, QKV, Q_LORA, FFN, LIVE_HEADS, HEAD_DIM, INDEX_DIM = 4096, 1536, 1024, 8192, 8, 512, 128
ENTRIES, TOPK, WORKSPACE = 4096, 64, 8200
SHARED_OPS = ["rms_norm", "wqkv_a", "q_norm"]
INDEXER = ["index_compress", "index_store", "wq_b_idx", "weights_proj", "index_rope", "logits", "topk_select", "topk_finalise"]
LAST = ["quantise", "wq_b", "q_rope", "ffn_up", "ffn_down", "attention", "o_proj"]
DENSE = SHARED_OPS + ["kv_store"] + LAST
SPARSE = SHARED_OPS + INDEXER + ["kv_store", "core_compress", "core_store"] + LAST
STEP = ["embed"] + DENSE + 4 * SPARSE + ["final_norm", "head"]


def moved(rows):
    """Bytes of each op at a batch."""
    def product(inputs, outputs, live, width=2):
        return inputs * outputs + rows * (2 * inputs + width * live)
    each = {
        "embed": 2 * HIDDEN, "rms_norm": 4 * HIDDEN, "final_norm": 4 * HIDDEN, "q_norm": 4 * Q_LORA,
        "index_store": 4 * 4 * INDEX_DIM + 2 * INDEX_DIM, "index_rope": 4 * LIVE_HEADS * INDEX_DIM,
        "logits": ENTRIES * (2 * INDEX_DIM + 4) + 2 * LIVE_HEADS * INDEX_DIM, "topk_select": 4 * ENTRIES + WORKSPACE,
        "topk_finalise": 8 * TOPK + 2048, "kv_store": 2 * 512 + 128, "core_store": 4 * 1024 + 384,
        "quantise": 3 * Q_LORA, "q_rope": 4 * LIVE_HEADS * 64,
        "attention": 2 * LIVE_HEADS * HEAD_DIM + 29 * 16 + TOPK * 384 + 1024,
    }
    launches = {
        "wqkv_a": product(HIDDEN, QKV, QKV), "wq_b_idx": product(Q_LORA, 8192, 1024), "weights_proj": product(HIDDEN, 64, 8),
        "index_compress": product(HIDDEN, 512, 128, 4), "core_compress": product(HIDDEN, 2048, 256, 4),
        "wq_b": Q_LORA * 32768 + rows * (Q_LORA + 2 * 4096), "ffn_up": product(HIDDEN, FFN, FFN),
        "ffn_down": product(FFN, HIDDEN, HIDDEN), "o_proj": 67_108_864 + rows * (1024 + 4096 + 4 * HIDDEN),
        "head": rows * (HIDDEN * 129_280 // 64 + 2 * HIDDEN),
    }
    return {**{op: rows * size for op, size in each.items()}, **launches}


def steps(path):
    """Microseconds of each op, by batch: the median over a batch's steps but the first, which warms up."""
    launches = {}
    with open(path, newline="") as file:
        lines = [line for line in file if line.startswith('"')]
    for row in csv.DictReader(lines):
        launch = launches.setdefault(int(row["ID"]), {"kernel": row["Kernel Name"]})
        launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    batches, whole = {}, []
    for number in sorted(launches):
        launch = launches[number]
        if launch["kernel"] == "embed":
            whole.append([])
            batches.setdefault(int(launch["launch__grid_size"]), []).append(whole[-1])
        if whole:
            whole[-1].append(launch["gpu__time_duration.sum"] / 1e3)
    found = {}
    for rows, all_steps in batches.items():
        complete = [step for step in all_steps if len(step) == len(STEP)]
        ops = {}
        for step in complete[1:] or complete:
            for op, time in zip(STEP, step):
                ops.setdefault(op, []).append(time)
        found[rows] = {op: sorted(times)[len(times) // 2] for op, times in ops.items()}
    return found


def main():
    bandwidth = float(sys.argv[1])
    found = {rows: ops for rows, ops in sorted(steps(sys.argv[2]).items()) if ops}
    print("| op | launches |" + "".join(f" batch {rows}: µs each | MB | floor |" for rows in found))
    print("|---|--:|" + "--:|--:|--:|" * len(found))
    for op in dict.fromkeys(STEP):
        cells = ""
        for rows, ops in found.items():
            size = moved(rows)[op]
            cells += f" {ops[op]:.1f} | {size / 1e6:.2f} | {size / bandwidth / 1e3:.1f} |"
        print(f"| {op} | {STEP.count(op)} |{cells}")
    cells = ""
    for rows, ops in found.items():
        total, size = (sum(STEP.count(op) * part[op] for op in ops) for part in (ops, moved(rows)))
        cells += f" {total:.0f} | {size / 1e6:.0f} | {size / bandwidth / 1e3:.0f} |"
    print(f"| all | {len(STEP)} |{cells}")


if __name__ == "__main__":
    main()
