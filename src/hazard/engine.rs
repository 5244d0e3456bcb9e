//! The built-in engine's captured graphs, without running them.
//!
//! A capture is recorded above the backends, so a backend that does nothing gives the very graphs that the virtual GPU
//! and CUDA are given, in a fraction of the time. Durations are charged by the virtual GPU's cost model for a typical
//! context, each op as if it had the machine to itself.

use std::{cell::RefCell, rc::Rc};

use super::{Benign, Capture, Report, examine, trace};
use crate::{
    device::{
        Backend, CapturedGraph, Device, EventId, GraphId, Op, SparseWeight, StreamId, WeightId,
        kernel::{CORE_RING_PAGE, ENTRY_PAGE, INDEX_RING_PAGE, KeyFormat, SWA_PAGE},
        sim::{CostModel, Kernels, Memory, reference::Reference},
    },
    engine::{config::Limits, model::Model, toggles::Toggles, weights::Weights},
    error::Result,
};

/// Analyses every bucket of the engine in the configuration that `variables` (names and values, as in the process's
/// environment) select.
pub fn report<N: AsRef<str>, V: AsRef<str>>(variables: impl IntoIterator<Item = (N, V)>) -> Result<Report> {
    let graphs = captures(&Toggles::resolve(variables)?)?.into_iter().map(examine).collect::<Result<Vec<_>>>()?;
    Ok(Report { graphs, ..Report::default() })
}

/// The graphs of every bucket, smallest first.
///
/// Without graph capture a step runs op by op; it is analysed as if it were captured, since its streams, events and
/// lifetimes are the same and only the host's launch gaps hide what it risks.
pub fn captures(toggles: &Toggles) -> Result<Vec<Capture>> {
    captures_with_pages(toggles, Limits::pages_for_batch(toggles.max_batch as usize, toggles.max_context))
}

/// The same with caches of `pages` pages: what comes behind them in the arena is where an engine of that size has it.
pub fn captures_with_pages(toggles: &Toggles, pages: u32) -> Result<Vec<Capture>> {
    let mut captured = toggles.clone();
    if !toggles.graph {
        captured.graph = true;
        captured.indexer_eager = false;
        captured.overlap = toggles.overlap && toggles.overlap_eager;
    }
    let keys = if captured.bf16_index_keys { KeyFormat::Bf16 } else { KeyFormat::Fp8 };
    let recorder = Recorder::default();
    let graphs = recorder.capture(&captured, pages)?;
    let mut memory = recorder.memory.borrow_mut();
    fill_positions(&graphs, &mut memory, captured.max_context / 2);
    let neutral = |(_, graph): &(u32, Rc<CapturedGraph>)| {
        let mut capture = trace::capture(graph, &padding(graph, keys));
        if !toggles.graph {
            capture.name.push_str(" (eager)");
        }
        for (node, (op, _)) in capture.nodes.iter_mut().zip(&graph.ops) {
            node.duration_us = Some(charge(op, &memory, &captured.cost));
        }
        capture
    };
    Ok(graphs.iter().map(neutral).collect())
}

/// The captured graphs as the device records them, for `pages` leasable pages.
pub fn graphs(toggles: &Toggles, pages: u32) -> Result<Vec<(u32, Rc<CapturedGraph>)>> {
    Recorder::default().capture(toggles, pages)
}

/// Page 0 of every cache: padded rows write it, nobody reads it, it is never leased.
fn padding(graph: &CapturedGraph, keys: KeyFormat) -> Vec<Benign> {
    let page = |name: &str| match name {
        "swa_cache" => Some(SWA_PAGE),
        "index_ring" => Some(INDEX_RING_PAGE),
        "index_keys" => Some(keys.page_bytes()),
        "core_ring" => Some(CORE_RING_PAGE),
        "c4_entries" => Some(ENTRY_PAGE),
        _ => None,
    };
    let caches = graph.lifetimes.iter().filter_map(|l| Some((l, page(&l.name)?)));
    caches
        .map(|(cache, page)| Benign {
            bytes: cache.address..cache.address + page,
            reason: format!("page 0 of {}, where padded rows write", cache.name),
        })
        .collect()
}

/// Every row at the same position of a typical context.
fn fill_positions(graphs: &[(u32, Rc<CapturedGraph>)], memory: &mut Memory, position: u32) {
    let lifetimes = graphs.iter().flat_map(|(_, graph)| &graph.lifetimes);
    for positions in lifetimes.filter(|l| l.name == "positions") {
        let rows = vec![position; (positions.bytes / 4) as usize];
        memory.write(positions.address, bytemuck::cast_slice(&rows));
    }
}

/// How long an op takes alone: its longest block, or its share of the machine.
fn charge(op: &Op, memory: &Memory, cost: &CostModel) -> f64 {
    let mut blocks = Vec::new();
    Reference::new().blocks(op, memory, &mut blocks);
    let rate = cost.rate(&op.kernel);
    let each = || blocks.iter().map(|block| rate.duration_ns(block));
    each().fold(0.0, f64::max).max(each().sum::<f64>() / cost.slots as f64) / 1000.0
}

/// A backend that keeps what the host copies in and runs nothing.
#[derive(Clone)]
struct Recorder {
    memory: Rc<RefCell<Memory>>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self { memory: Rc::new(RefCell::new(Memory::new(0))) }
    }
}

impl Recorder {
    fn capture(&self, toggles: &Toggles, pages: u32) -> Result<Vec<(u32, Rc<CapturedGraph>)>> {
        let device = Device::new(Box::new(self.clone()));
        Ok(Model::on(device, toggles, pages, &Weights::new(toggles.max_context))?.graphs())
    }
}

impl Backend for Recorder {
    fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.memory.borrow_mut().reserve(bytes);
        Ok(())
    }

    fn load_weight(&mut self, _: WeightId, _: &SparseWeight) -> Result<()> {
        Ok(())
    }

    fn create_stream(&mut self, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn enqueue(&mut self, _: StreamId, _: &Op) -> Result<()> {
        Ok(())
    }

    fn record(&mut self, _: StreamId, _: EventId) -> Result<()> {
        Ok(())
    }

    fn wait(&mut self, _: StreamId, _: EventId) -> Result<()> {
        Ok(())
    }

    fn query(&mut self, _: EventId) -> Result<bool> {
        Ok(true)
    }

    fn begin_capture(&mut self, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn end_capture(&mut self, _: GraphId, _: &CapturedGraph) -> Result<()> {
        Ok(())
    }

    fn launch(&mut self, _: GraphId, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        self.memory.borrow_mut().write(address, bytes);
        Ok(())
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(self.memory.borrow().bytes(address..address + bytes.len() as u64));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::device::sim::cost::CostModel;

    #[test]
    fn every_kernel_of_a_step_has_a_floor_that_can_be_scaled() {
        let bf16 = ("SGLANG_DSV4_BF16_INDEX_K", "1");
        let configurations = [
            vec![],
            vec![bf16],
            vec![bf16, ("SGLANG_SM120_TRITON_INDEXER", "0")],
            vec![bf16, ("TOOLSTORM_GE_DIFF", "1")],
        ];
        let mut kernels = BTreeSet::from(["prefill"]);
        for variables in configurations {
            let graphs = graphs(&Toggles::resolve(variables).unwrap(), 1).unwrap();
            kernels.extend(graphs.iter().flat_map(|(_, graph)| &graph.ops).map(|(op, _)| op.kernel.name()));
        }
        let floors: BTreeSet<_> = CostModel::default().names().into_iter().collect();
        let missing: Vec<_> = kernels.difference(&floors).collect();
        assert!(kernels.len() > 20 && missing.is_empty(), "{missing:?} of {} kernels", kernels.len());
    }
}
