//! The report for a terminal: mistakes once, with their fixes; then what each graph is exposed to.

use std::{collections::BTreeSet, fmt::Write};

use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::hazard::{
    Graph, Group, Hazard, Lifetime, Report,
    bite::Bite,
    cause::{Cause, operation, place},
    fix::Fix,
};

/// Hazards listed for each cause and graph unless everything is asked for.
const LISTED: usize = 2;

/// Renders the report; `all` lists every hazard instead of the first few of each cause, and every graph of every group.
pub fn render(report: &Report, all: bool) -> String {
    let mut text = String::new();
    for (graph, cause) in distinct(report) {
        detail(&mut text, report, graph, cause, all);
    }
    let groups = report.groups();
    if all || groups.is_empty() {
        for graph in &report.graphs {
            summary(&mut text, graph);
        }
    }
    let warnings: BTreeSet<&String> = report.graphs.iter().flat_map(|g| &g.capture.warnings).collect();
    for warning in warnings.into_iter().chain(&report.warnings) {
        line(&mut text, &format!("warning: {warning}"));
    }
    if !groups.is_empty() {
        line(&mut text, &table(&groups));
    }
    for clobber in &report.clobbers {
        line(&mut text, &format!("between graphs: {}", clobber.why));
    }
    let tensors = report.tensors();
    let verdict = match report.hazards() {
        0 => format!("no hazards in {}", count(report.graphs.len(), "graph")),
        n => format!(
            "{} in {}: {}",
            count(n as usize, "hazard"),
            count(report.graphs.len(), "graph"),
            if tensors.is_empty() { "between graphs".to_owned() } else { tensors.join(", ") }
        ),
    };
    line(&mut text, &verdict);
    text.truncate(text.trim_end().len());
    text
}

/// Each cause once, in the graph where it has the most hazards.
fn distinct(report: &Report) -> Vec<(&Graph, &Cause)> {
    let mut found: Vec<(&Graph, &Cause)> = Vec::new();
    for graph in &report.graphs {
        for cause in &graph.causes {
            match found.iter_mut().find(|(_, known)| same(known, cause)) {
                Some(known) if known.1.hazards.len() < cause.hazards.len() => *known = (graph, cause),
                Some(_) => {}
                None => found.push((graph, cause)),
            }
        }
    }
    found
}

fn same(a: &Cause, b: &Cause) -> bool {
    (&a.tensor, a.recycled) == (&b.tensor, b.recycled)
}

fn detail(text: &mut String, report: &Report, graph: &Graph, cause: &Cause, all: bool) {
    line(text, &cause.why);
    let shown = if all { cause.hazards.len() } else { LISTED.min(cause.hazards.len()) };
    for &index in &cause.hazards[..shown] {
        hazard(text, graph, &graph.analysis.hazards[index]);
    }
    if shown < cause.hazards.len() {
        line(
            text,
            &format!(
                "  … and {} of `{}` (--all lists them)",
                count(cause.hazards.len() - shown, "more hazard"),
                graph.full_name()
            ),
        );
    }
    if report.graphs.len() > 1 {
        let elsewhere: Vec<String> = report
            .graphs
            .iter()
            .filter(|g| g.capture.group == graph.capture.group)
            .filter_map(|g| g.causes.iter().find(|c| same(c, cause)).map(|c| exposure(g, c)))
            .collect();
        line(text, &format!("  in {}", elsewhere.join("; ")));
    }
    for fix in &cause.fixes {
        line(text, &format!("  fix: {}", remedy(fix)));
    }
    line(text, "");
}

/// One graph's share in a cause: hazards, bytes at stake, and whether it bites there.
fn exposure(graph: &Graph, cause: &Cause) -> String {
    let hazards = || cause.hazards.iter().map(|&i| &graph.analysis.hazards[i]);
    let stake = hazards().map(|h| h.shared).max().unwrap_or(0);
    let bite = graph.bite(hazards()).map_or_else(String::new, |b| format!(", bite {}", b.label()));
    format!("{}: {}, {stake} B at stake{bite}", graph.capture.name, count(cause.hazards.len(), "hazard"))
}

fn hazard(text: &mut String, graph: &Graph, hazard: &Hazard) {
    let likely = hazard.likely.map_or_else(String::new, |k| format!(", likely {}", k.label()));
    let slack = graph
        .schedule
        .as_ref()
        .map(|s| s.estimate(hazard))
        .map_or_else(String::new, |e| format!(", slack {:.1} µs (bite {})", e.slack_us, e.bite.label()));
    line(
        text,
        &format!(
            "  {} ({}{likely}) in {}: {} then {}{slack}",
            hazard.kind.label(),
            hazard.likelihood.label(),
            graph.full_name(),
            whereabouts(graph, hazard.first),
            whereabouts(graph, hazard.second),
        ),
    );
    tensor(text, graph, hazard.first_lifetime);
    if hazard.recycled() {
        tensor(text, graph, hazard.second_lifetime);
    }
    line(text, &format!("    share {} B in {:#x}..{:#x}", hazard.shared, hazard.bytes.start, hazard.bytes.end));
}

fn whereabouts(graph: &Graph, node: u32) -> String {
    let order = &graph.analysis.order;
    format!(
        "{} [node {node}, place {} of chain {}]",
        operation(&graph.capture, node),
        order.position(node),
        order.chain(node)
    )
}

fn tensor(text: &mut String, graph: &Graph, lifetime: u32) {
    let Lifetime { name, bytes, allocated, freed, inside, .. } = &graph.capture.lifetimes[lifetime as usize];
    let at = |site| {
        let place = place(site);
        if place.is_empty() { format!("node {}", site.node) } else { format!("node {} ({place})", site.node) }
    };
    let born =
        if *inside { format!("allocated before {}", at(allocated)) } else { "allocated before the capture".into() };
    let died =
        freed.as_ref().map_or_else(|| "held to the end".to_owned(), |site| format!("dropped before {}", at(site)));
    line(text, &format!("    `{name}` {:#x}..{:#x}, {born}, {died}", bytes.start, bytes.end));
}

fn remedy(fix: &Fix) -> String {
    let mut price = Vec::new();
    if fix.extra_bytes > 0 {
        price.push(format!("{} B more", fix.extra_bytes));
    }
    if fix.waits > 0 {
        price.push(count(fix.waits, "more wait"));
    }
    let outcome = if fix.verified() {
        "verified: none left, none new".to_owned()
    } else {
        format!("not enough: {} gone, {} left, {} new", fix.removed, fix.left, fix.added)
    };
    format!("{} ({outcome}; {})", fix.what, price.join(", "))
}

fn summary(text: &mut String, graph: &Graph) {
    let Graph { capture, analysis, .. } = graph;
    let mut row = format!(
        "{}: {}, {}, {}, {}, {}",
        graph.full_name(),
        count(capture.nodes.len(), "node"),
        count(capture.edges.len(), "edge"),
        count(capture.lifetimes.len(), "lifetime"),
        count(analysis.order.chains() as usize, "chain"),
        count(graph.hazards() as usize, "hazard"),
    );
    if analysis.omitted > 0 {
        let _ = write!(row, " ({} of them not listed)", analysis.omitted);
    }
    if analysis.benign > 0 {
        let _ = write!(row, ", {} in known benign bytes", count(analysis.benign as usize, "conflict"));
    }
    if analysis.unjudged > 0 {
        let _ =
            write!(row, ", {} of one tensor that may be reads", count(analysis.unjudged as usize, "unordered pair"));
    }
    line(text, &row);
}

/// One row an arm or a process.
fn table(groups: &[Group]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["", "graphs", "hazards", "bite", "tensors"]).force_no_tty();
    for group in groups {
        let right = |n: u64| Cell::new(n).set_alignment(CellAlignment::Right);
        table.add_row([
            Cell::new(group.name),
            right(group.graphs.len() as u64),
            right(group.hazards()),
            Cell::new(group.bite().map_or("–", Bite::label)),
            Cell::new(group.tensors().join(", ")),
        ]);
    }
    table.trim_fmt()
}

fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

fn line(text: &mut String, content: &str) {
    text.push_str(content);
    text.push('\n');
}
