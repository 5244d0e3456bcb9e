//! One self-contained page: every cause with its drawing, fixes and hazards, graph by graph.

use minijinja::{Environment, Value, context, value::Serde};

use super::{json, lanes};
use crate::{
    error::{Error, Result},
    hazard::{Graph, Report},
};

/// Drawings on one page at most: each cause is drawn in the first graphs that have it.
const DRAWINGS: usize = 200;

/// Renders the page.
pub fn page(report: &Report) -> Result<String> {
    let mut left = DRAWINGS;
    let drawings: Vec<Vec<String>> = report
        .graphs
        .iter()
        .map(|graph| {
            let wanted = graph.causes.len().min(left);
            left -= wanted;
            let heads = graph.causes[..wanted].iter().map(|c| &graph.analysis.hazards[c.hazards[0]]);
            heads.map(|hazard| lanes::draw(graph, hazard)).collect()
        })
        .collect();
    let titles: Vec<String> = report.graphs.iter().map(Graph::full_name).collect();
    let broken = |e: minijinja::Error| Error::usage(format!("cannot render the page: {e:#}"));
    let mut environment = Environment::new();
    environment.add_template("page.html", include_str!("page.html")).map_err(broken)?;
    let template = environment.get_template("page.html").map_err(broken)?;
    template.render(context! { report => Value::from(Serde(json::document(report))), drawings, titles }).map_err(broken)
}
