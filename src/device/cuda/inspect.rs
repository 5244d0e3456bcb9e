//! UNSAFE: reads a captured graph back from the driver, and compares it with the trace.
//!
//! # Safety
//!
//! Handles come from a live graph and are used before anything changes it. Arrays are sized by a first call that asks for
//! the count. Argument values are read through the node's own pointers, which live as long as the node, with the size that
//! the driver names for each.
#![expect(unsafe_code, reason = "the driver's interface is C; see the section on safety")]

use std::{collections::BTreeMap, ffi::CStr};

use cudarc::driver::{DriverError, sys};

use super::gpu::{NativeGraph, failed};
use crate::{
    device::CapturedGraph,
    error::{Error, Result},
};

/// A kernel node of a captured graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The kernel's name in its module.
    pub kernel: String,
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Argument bytes, one after the other.
    pub arguments: Vec<u8>,
}

/// A captured graph as the driver holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Native {
    /// Kernel nodes in order of capture.
    pub nodes: Vec<Node>,
    /// Direct edges.
    pub edges: Vec<(u32, u32)>,
}

pub(super) fn read(graph: &NativeGraph) -> Result<Native> {
    let failure = |error: DriverError| failed("reading a graph back", error);
    let graph = graph.handle();
    let mut count = 0;
    // SAFETY: a null array asks for the count.
    unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) }.result().map_err(failure)?;
    let mut handles = vec![std::ptr::null_mut(); count];
    // SAFETY: the array has the count just named.
    unsafe { sys::cuGraphGetNodes(graph, handles.as_mut_ptr(), &raw mut count) }.result().map_err(failure)?;
    let nodes = handles.iter().map(|handle| node(*handle).map_err(failure)).collect::<Result<_>>()?;

    let places: BTreeMap<_, _> = handles.iter().zip(0u32..).map(|(handle, place)| (*handle, place)).collect();
    let mut count = 0;
    let none = std::ptr::null_mut();
    // SAFETY: null arrays ask for the count.
    unsafe { sys::cuGraphGetEdges_v2(graph, none, none, std::ptr::null_mut(), &raw mut count) }
        .result()
        .map_err(failure)?;
    let (mut from, mut to) = (vec![std::ptr::null_mut(); count], vec![std::ptr::null_mut(); count]);
    // SAFETY: a plain structure of integers, for which zero is a valid value.
    let mut data = vec![unsafe { std::mem::zeroed::<sys::CUgraphEdgeData>() }; count];
    // SAFETY: the arrays have the count just named.
    unsafe { sys::cuGraphGetEdges_v2(graph, from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &raw mut count) }
        .result()
        .map_err(failure)?;
    let mut edges: Vec<_> =
        from.iter().zip(&to).filter_map(|(from, to)| Some((*places.get(from)?, *places.get(to)?))).collect();
    edges.sort_unstable();
    Ok(Native { nodes, edges })
}

fn node(handle: sys::CUgraphNode) -> std::result::Result<Node, DriverError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: a node of a live graph; one value is written.
    unsafe { sys::cuGraphNodeGetType(handle, &raw mut kind) }.result()?;
    if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(Node { kernel: format!("{kind:?}"), grid: (0, 0, 0), arguments: Vec::new() });
    }
    // SAFETY: a plain structure of integers and pointers, for which zero is a valid value.
    let mut parameters: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    // SAFETY: a kernel node; one structure is written.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(handle, &raw mut parameters) }.result()?;
    let mut name = std::ptr::null();
    // SAFETY: the node's function; the name belongs to its module, which lives.
    unsafe { sys::cuFuncGetName(&raw mut name, parameters.func) }.result()?;
    // SAFETY: the driver gave a NUL-terminated string.
    let kernel = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut arguments = Vec::new();
    for index in 0.. {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: two integers are written; past the last argument the call fails.
        let more = unsafe { sys::cuFuncGetParamInfo(parameters.func, index, &raw mut offset, &raw mut size) };
        if more.result().is_err() || parameters.kernelParams.is_null() {
            break;
        }
        // SAFETY: the node holds one pointer for each argument, to as many bytes as the driver names.
        let bytes = unsafe { std::slice::from_raw_parts((*parameters.kernelParams.add(index)).cast::<u8>(), size) };
        arguments.extend_from_slice(bytes);
    }
    let grid = (parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ);
    Ok(Node { kernel, grid, arguments })
}

impl Native {
    /// Fails unless the trace and the graph have the same ops, ordered alike, at the same addresses.
    pub(super) fn agree(&self, trace: &CapturedGraph, arena: u64) -> Result<()> {
        if self.nodes.len() != trace.ops.len() {
            return Err(Error::usage(format!(
                "cuda: the captured graph has {} nodes, the trace {} ops",
                self.nodes.len(),
                trace.ops.len()
            )));
        }
        let (native, traced) = (ancestors(self.nodes.len(), &self.edges), ancestors(trace.ops.len(), &trace.edges));
        for (place, (native, traced)) in native.iter().zip(&traced).enumerate() {
            if native != traced {
                return Err(Error::usage(format!("cuda: node {place} of the captured graph is ordered differently")));
            }
        }
        for (place, (node, (op, _))) in self.nodes.iter().zip(&trace.ops).enumerate() {
            for operand in op.reads.iter().chain(&op.writes).filter(|operand| !operand.region.is_empty()) {
                let address = (arena + operand.region.base).to_le_bytes();
                if !node
                    .arguments
                    .chunks_exact(4)
                    .zip(node.arguments.chunks_exact(4).skip(1))
                    .any(|(low, high)| low == &address[..4] && high == &address[4..])
                {
                    return Err(Error::usage(format!(
                        "cuda: node {place} ({}) of the captured graph lacks the address {:#x} of `{}`",
                        node.kernel,
                        operand.region.base,
                        op.kernel.name()
                    )));
                }
            }
        }
        Ok(())
    }
}

/// For each node, which nodes come before it in every order.
fn ancestors(count: usize, edges: &[(u32, u32)]) -> Vec<Vec<bool>> {
    let mut before = vec![vec![false; count]; count];
    let mut sorted = edges.to_vec();
    sorted.sort_unstable_by_key(|&(from, to)| (to, from));
    for (from, to) in sorted {
        let earlier = before[from as usize].clone();
        let later = &mut before[to as usize];
        later[from as usize] = true;
        for (later, earlier) in later.iter_mut().zip(earlier) {
            *later |= earlier;
        }
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_follow_paths() {
        let before = ancestors(4, &[(1, 3), (0, 1), (0, 2)]);
        assert_eq!(before[3], [true, true, false, false]);
        assert_eq!(before[2], [true, false, false, false]);
        assert_eq!(before[0], [false; 4]);
    }
}
