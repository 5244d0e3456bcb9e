//! One hazard as a drawing: streams as lanes in host order, the two operations, lifetime bars, the missing edge.

use std::fmt::Write;

use crate::hazard::{Graph, Hazard, Lifetime};

/// Operations drawn around each of the two when they are too far apart to draw all between them.
const AROUND: u32 = 14;
const COLUMN: f64 = 34.0;
const LANE: f64 = 46.0;
const LEFT: f64 = 110.0;
const TOP: f64 = 18.0;

/// Draws one hazard as SVG.
pub fn draw(graph: &Graph, hazard: &Hazard) -> String {
    Drawing::new(graph, hazard).svg()
}

struct Drawing<'a> {
    graph: &'a Graph,
    hazard: &'a Hazard,
    columns: Vec<u32>,
    lanes: Vec<u32>,
}

impl<'a> Drawing<'a> {
    fn new(graph: &'a Graph, hazard: &'a Hazard) -> Self {
        let last = graph.capture.nodes.len() as u32 - 1;
        let near = |node: u32| node.saturating_sub(AROUND)..=(node + AROUND).min(last);
        let columns: Vec<u32> = if hazard.second - hazard.first <= 3 * AROUND {
            (hazard.first.saturating_sub(AROUND)..=(hazard.second + AROUND).min(last)).collect()
        } else {
            near(hazard.first).chain(near(hazard.second)).collect()
        };
        let mut lanes: Vec<u32> = columns.iter().map(|&n| graph.analysis.order.chain(n)).collect();
        lanes.sort_unstable();
        lanes.dedup();
        Self { graph, hazard, columns, lanes }
    }

    fn x(&self, node: u32) -> f64 {
        LEFT + COLUMN * self.columns.partition_point(|&c| c < node) as f64
    }

    fn y(&self, node: u32) -> f64 {
        let chain = self.graph.analysis.order.chain(node);
        TOP + LANE * self.lanes.partition_point(|&lane| lane < chain) as f64
    }

    fn svg(&self) -> String {
        let bars_at = TOP + LANE * self.lanes.len() as f64;
        let (width, height) = (LEFT + COLUMN * self.columns.len() as f64 + 20.0, bars_at + 64.0);
        let mut svg = String::new();
        let _ = write!(
            svg,
            "<svg viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" role=\"img\" xmlns=\"http://www.w3.org/2000/svg\">"
        );
        self.lane_lines(&mut svg, width);
        self.edges(&mut svg);
        for &node in &self.columns {
            self.operation(&mut svg, node);
        }
        self.missing_edge(&mut svg);
        self.bar(&mut svg, self.hazard.first_lifetime, "first", bars_at);
        if self.hazard.recycled() {
            self.bar(&mut svg, self.hazard.second_lifetime, "second", bars_at + 26.0);
        }
        svg.push_str("</svg>");
        svg
    }

    fn lane_lines(&self, svg: &mut String, width: f64) {
        for (index, &lane) in self.lanes.iter().enumerate() {
            let y = TOP + LANE * index as f64 + 10.0;
            let _ = write!(
                svg,
                "<line class=\"lane\" x1=\"{LEFT}\" x2=\"{width:.0}\" y1=\"{y:.0}\" y2=\"{y:.0}\"/><text x=\"4\" y=\"{:.0}\">{}</text>",
                y + 4.0,
                escape(&self.lane_name(lane))
            );
        }
    }

    fn lane_name(&self, lane: u32) -> String {
        let capture = &self.graph.capture;
        let member = self.columns.iter().find(|&&n| self.graph.analysis.order.chain(n) == lane);
        let stream = member.and_then(|&n| capture.nodes[n as usize].stream);
        stream.and_then(|s| capture.streams.get(s as usize)).cloned().unwrap_or_else(|| format!("chain {lane}"))
    }

    fn edges(&self, svg: &mut String) {
        for &(a, b) in &self.graph.capture.edges {
            let drawn = |n| self.columns.binary_search(&n).is_ok();
            if !drawn(a) || !drawn(b) || self.graph.analysis.order.chain(a) == self.graph.analysis.order.chain(b) {
                continue;
            }
            let _ = write!(
                svg,
                "<line class=\"edge\" x1=\"{:.0}\" y1=\"{:.0}\" x2=\"{:.0}\" y2=\"{:.0}\"/>",
                self.x(a) + 26.0,
                self.y(a) + 10.0,
                self.x(b),
                self.y(b) + 10.0
            );
        }
    }

    fn operation(&self, svg: &mut String, node: u32) {
        let class = match node {
            n if n == self.hazard.first => "op first",
            n if n == self.hazard.second => "op second",
            _ => "op",
        };
        let kernel = &self.graph.capture.nodes[node as usize].kernel;
        let short: String = kernel.rsplit("::").next().unwrap_or(kernel).chars().take(6).collect();
        let _ = write!(
            svg,
            "<g class=\"{class}\"><title>{}</title><rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"26\" height=\"20\" rx=\"3\"/><text x=\"{:.0}\" y=\"{:.0}\">{}</text></g>",
            escape(&format!("node {node}: {kernel}")),
            self.x(node) + 13.0,
            self.y(node) + 31.0,
            escape(&short),
            x = self.x(node),
            y = self.y(node),
        );
    }

    fn missing_edge(&self, svg: &mut String) {
        let (a, b) = (self.hazard.first, self.hazard.second);
        let _ = write!(
            svg,
            "<path class=\"missing\" d=\"M{:.0} {:.0} L{:.0} {:.0}\"><title>missing edge</title></path>",
            self.x(a) + 26.0,
            self.y(a) + 10.0,
            self.x(b),
            self.y(b) + 10.0
        );
    }

    fn bar(&self, svg: &mut String, lifetime: u32, class: &str, y: f64) {
        let Lifetime { name, allocated, freed, bytes, .. } = &self.graph.capture.lifetimes[lifetime as usize];
        let from = self.x(allocated.node);
        let end = LEFT + COLUMN * self.columns.len() as f64;
        let to = freed.as_ref().map_or(end, |site| self.x(site.node)).max(from + 6.0);
        let _ = write!(
            svg,
            "<g class=\"bar {class}\"><rect x=\"{from:.0}\" y=\"{y:.0}\" width=\"{:.0}\" height=\"10\" rx=\"2\"/><text x=\"{from:.0}\" y=\"{:.0}\">{}</text></g>",
            to - from,
            y + 21.0,
            escape(&format!("{name}  {:#x}..{:#x}", bytes.start, bytes.end)),
        );
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
