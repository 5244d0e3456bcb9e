//! From captures to a report: hazards with their causes, verified fixes and estimates.

use super::{
    Analysis, Capture, Hazard, analyse,
    bite::{Bite, Schedule},
    cause::{Cause, causes},
    fix::fixes,
    replay::Clobber,
};
use crate::error::Result;

/// Mistakes of one graph whose fixes are tried: each costs four analyses of the whole graph.
const TRIED: usize = 50;

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
    /// Graphs that were captured and could not be read: what is not here is not known to be without hazards.
    pub missing: u64,
    /// What a reader should know about the report as a whole.
    pub warnings: Vec<String>,
}

impl Report {
    /// Number of hazards over all graphs.
    pub fn hazards(&self) -> u64 {
        self.graphs.iter().map(Graph::hazards).sum::<u64>() + self.clobbers.len() as u64
    }

    /// Tensors whose early drop (or missing event) explains the hazards, each once, in order of appearance.
    pub fn tensors(&self) -> Vec<&str> {
        tensors(self.graphs.iter())
    }

    /// Arms or processes, in order of appearance; none where the graphs belong to one.
    pub fn groups(&self) -> Vec<Group<'_>> {
        let mut groups: Vec<Group<'_>> = Vec::new();
        for graph in self.graphs.iter().filter(|g| !g.capture.group.is_empty()) {
            let name = graph.capture.group.as_str();
            match groups.iter_mut().find(|group| group.name == name) {
                Some(group) => group.graphs.push(graph),
                None => groups.push(Group { name, graphs: vec![graph] }),
            }
        }
        groups
    }
}

/// The graphs of one arm or process.
#[derive(Debug)]
pub struct Group<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its graphs.
    pub graphs: Vec<&'a Graph>,
}

impl Group<'_> {
    /// Number of hazards over its graphs.
    pub fn hazards(&self) -> u64 {
        self.graphs.iter().map(|graph| graph.hazards()).sum()
    }

    /// Tensors that explain its hazards, as [`Report::tensors`].
    pub fn tensors(&self) -> Vec<&str> {
        tensors(self.graphs.iter().copied())
    }

    /// The gravest estimate of its hazards, where durations are charged.
    pub fn bite(&self) -> Option<Bite> {
        self.graphs.iter().filter_map(|graph| graph.bite(graph.analysis.hazards.iter())).min()
    }
}

fn tensors<'a>(graphs: impl Iterator<Item = &'a Graph>) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for cause in graphs.flat_map(|g| &g.causes) {
        if !names.contains(&cause.tensor.as_str()) {
            names.push(&cause.tensor);
        }
    }
    names
}

impl Graph {
    /// Number of its hazards, those that are not listed included.
    pub fn hazards(&self) -> u64 {
        self.analysis.hazards.len() as u64 + self.analysis.omitted
    }

    /// Its name, behind that of its group.
    pub fn full_name(&self) -> String {
        let Capture { group, name, .. } = &self.capture;
        if group.is_empty() { name.clone() } else { format!("{group} {name}") }
    }

    /// The gravest estimate among `hazards` of it, where durations are charged.
    pub fn bite<'a>(&self, hazards: impl Iterator<Item = &'a Hazard>) -> Option<Bite> {
        let schedule = self.schedule.as_ref()?;
        hazards.map(|hazard| schedule.estimate(hazard).bite).min()
    }
}

/// Analyses one capture, explains what it finds and verifies the fixes of the gravest mistakes.
pub fn examine(mut capture: Capture) -> Result<Graph> {
    let analysis = analyse(&capture).map_err(|e| e.within(&capture.name))?;
    let schedule = Schedule::new(&capture, &analysis.order);
    let mut causes = causes(&capture, &analysis);
    let solved = causes
        .iter()
        .take(TRIED)
        .map(|cause| fixes(&capture, &analysis, cause))
        .collect::<Result<Vec<_>>>()
        .map_err(|e| e.within(&capture.name))?;
    for (cause, fixes) in causes.iter_mut().zip(solved) {
        cause.fixes = fixes;
    }
    if causes.len() > TRIED {
        capture.warnings.push(format!("mistakes whose fixes were not tried: {}", causes.len() - TRIED));
    }
    Ok(Graph { capture, analysis, causes, schedule })
}
