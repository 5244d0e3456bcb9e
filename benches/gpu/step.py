"""A decode step of the charged geometry in PyTorch under a CUDA graph: what the engine's step is compared with.

Five layers, four of them with an indexer; bf16 weights (twice the bytes of the engine's fp8-sized ones), cuBLAS matrix
products, the Triton index logits, torch.topk, one stream. Prints JSON lines. Usage: step.py [CONTEXT]
"""
import json
import sys

import torch
import torch.nn.functional as F
import triton

from kernels import DIMS, HEADS, PAGE, bench, triton_logits

DEVICE = "cuda"
HIDDEN, Q_LORA, KV, FFN, HEAD_DIM, TOPK, WINDOW = 4096, 1024, 512, 8192, 512, 64, 128


def weight(inputs, outputs):
    return torch.randn(inputs, outputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5


class Layer:
    def __init__(self, rows, entries, indexed):
        self.rows, self.indexed = rows, indexed
        self.qkv, self.q = weight(HIDDEN, Q_LORA + KV), weight(Q_LORA, HEADS * HEAD_DIM)
        self.up, self.down = weight(HIDDEN, FFN), weight(FFN, HIDDEN)
        self.out_a, self.out_b = weight(HEADS * HEAD_DIM // 8, 1024), weight(8 * 1024, HIDDEN)
        self.window = torch.randn(rows, WINDOW, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        self.slots = torch.arange(rows, device=DEVICE)
        if indexed:
            self.index_q, self.index_w = weight(Q_LORA, HEADS * DIMS), weight(HIDDEN, HEADS)
            self.compress, self.core = weight(HIDDEN, 4 * DIMS), weight(HIDDEN, 4 * HEAD_DIM)
            pages = (entries + PAGE - 1) // PAGE
            self.keys = torch.randn(rows * pages, PAGE, DIMS, device=DEVICE, dtype=torch.bfloat16)
            self.table = torch.randperm(rows * pages, device=DEVICE).to(torch.int32).view(rows, pages)
            self.lengths = torch.full((rows,), entries, device=DEVICE, dtype=torch.int32)
            self.entries = torch.randn(rows, pages * PAGE, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)

    def __call__(self, x):
        rows = self.rows
        h = F.rms_norm(x, (HIDDEN,))
        qkv = h @ self.qkv
        latent = F.rms_norm(qkv[:, :Q_LORA], (Q_LORA,))
        self.window[:, 0] = qkv[:, Q_LORA:]
        attended = self.window
        if self.indexed:
            h @ self.compress
            h @ self.core
            query, weights = latent @ self.index_q, (h @ self.index_w).float()
            pages = self.table.shape[1]
            logits = torch.empty(rows, pages * PAGE, device=DEVICE)
            triton_logits[(rows, triton.cdiv(pages, 2))](query, weights, self.keys, self.table, self.lengths, logits, pages,
                                                         pages * PAGE, HEADS, DIMS, PAGE, 2, num_warps=4, num_stages=3)
            chosen = torch.topk(logits, min(TOPK, logits.shape[1]), dim=1).indices
            attended = torch.cat([self.window, self.entries[self.slots[:, None], chosen]], 1)
        q = (latent @ self.q).view(rows, HEADS, HEAD_DIM)
        fed = F.silu(h @ self.up) @ self.down
        scores = torch.softmax(q @ attended.transpose(1, 2) / HEAD_DIM**0.5, -1)
        out = (scores @ attended).view(rows, 8, HEADS * HEAD_DIM // 8) @ self.out_a
        return x + out.reshape(rows, 8 * 1024) @ self.out_b + fed


def main():
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    for rows in (1, 8, 64):
        layers = [Layer(rows, context // 4, indexed) for indexed in (False, True, True, True, True)]
        head = weight(HIDDEN, 129280)
        x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)

        def step():
            y = x
            for layer in layers:
                y = layer(y)
            return (F.rms_norm(y, (HIDDEN,)) @ head).argmax(-1)

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        eager = bench(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = bench(graph.replay)
        print(json.dumps({"rows": rows, "context": context, "eager_us": eager, "graph_us": replay,
                          "tokens_a_second": rows / replay[0] * 1e6}), flush=True)
        del layers, head, graph


if __name__ == "__main__":
    main()
