//! From captures to a report: hazards with their causes, verified fixes and estimates.

use super::{
    Analysis, Capture, analyse,
    bite::Schedule,
    cause::{Cause, causes},
    fix::fixes,
    replay::Clobber,
};
use crate::error::Result;

/// One analysed graph.
#[derive(Debug)]
pub struct Graph {
    /// What was analysed.
    pub capture: Capture,
    /// What was found.
    pub analysis: Analysis,
    /// The mistakes behind it.
    pub causes: Vec<Cause>,
    /// When its operations run, where durations are charged.
    pub schedule: Option<Schedule>,
}

/// Everything one command found.
#[derive(Debug, Default)]
pub struct Report {
    /// Each graph (each bucket) on its own.
    pub graphs: Vec<Graph>,
    /// What goes wrong between graphs of one pool under the replay order given.
    pub clobbers: Vec<Clobber>,
}

impl Report {
    /// Number of hazards over all graphs.
    pub fn hazards(&self) -> u64 {
        let listed = self.graphs.iter().map(|g| g.analysis.hazards.len() as u64 + g.analysis.omitted).sum::<u64>();
        listed + self.clobbers.len() as u64
    }

    /// Tensors whose early drop (or missing event) explains the hazards, each once, in order of appearance.
    pub fn tensors(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for cause in self.graphs.iter().flat_map(|g| &g.causes) {
            if !names.contains(&cause.tensor.as_str()) {
                names.push(&cause.tensor);
            }
        }
        names
    }
}

/// Analyses one capture, explains what it finds and verifies the fixes.
pub fn examine(capture: Capture) -> Result<Graph> {
    let analysis = analyse(&capture).map_err(|e| e.within(&capture.name))?;
    let schedule = Schedule::new(&capture, &analysis.order);
    let mut causes = causes(&capture, &analysis);
    let solved = causes
        .iter()
        .map(|cause| fixes(&capture, &analysis, cause))
        .collect::<Result<Vec<_>>>()
        .map_err(|e| e.within(&capture.name))?;
    for (cause, fixes) in causes.iter_mut().zip(solved) {
        cause.fixes = fixes;
    }
    Ok(Graph { capture, analysis, causes, schedule })
}
