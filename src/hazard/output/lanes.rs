//! One hazard as a drawing: streams as lanes in host order, the two operations, lifetime bars, the missing edge.

use std::fmt::Write;

use crate::hazard::{Graph, Hazard, Lifetime};

/// Operations drawn around each of the two.
const AROUND: u32 = 9;
/// Operations drawn between the two at most; else a gap stands for those in the middle.
const BETWEEN: u32 = 3 * AROUND;
const COLUMN: f64 = 34.0;
const BOX: f64 = 26.0;
/// A lane: its operations and, slanted beneath, their names.
const LANE: f64 = 74.0;
const LEFT: f64 = 96.0;
const RIGHT: f64 = 64.0;
const TOP: f64 = 24.0;
/// Characters of an operation's name; of the two in question more.
const NAME: usize = 15;
const FULL_NAME: usize = 17;
/// Mean advance of a character of a bar's text, to keep the text inside.
const CHARACTER: f64 = 6.6;

/// Draws one hazard as SVG.
pub fn draw(graph: &Graph, hazard: &Hazard) -> String {
    Drawing::new(graph, hazard).svg()
}

struct Drawing<'a> {
    graph: &'a Graph,
    hazard: &'a Hazard,
    columns: Vec<u32>,
    /// The first operation behind the gap, where there is one.
    resumes: Option<u32>,
    lanes: Vec<u32>,
}

impl<'a> Drawing<'a> {
    fn new(graph: &'a Graph, hazard: &'a Hazard) -> Self {
        let last = graph.capture.nodes.len() as u32 - 1;
        let (low, high) = (hazard.first.saturating_sub(AROUND), (hazard.second + AROUND).min(last));
        let resumes = (hazard.second - hazard.first > BETWEEN).then(|| hazard.second - AROUND);
        let columns: Vec<u32> = match resumes {
            None => (low..=high).collect(),
            Some(resumes) => (low..=hazard.first + AROUND).chain(resumes..=high).collect(),
        };
        let mut lanes: Vec<u32> = columns.iter().map(|&n| graph.analysis.order.chain(n)).collect();
        lanes.sort_unstable();
        lanes.dedup();
        Self { graph, hazard, columns, resumes, lanes }
    }

    fn x(&self, node: u32) -> f64 {
        let gap = self.resumes.is_some_and(|resumes| node >= resumes);
        LEFT + COLUMN * (self.columns.partition_point(|&c| c < node) as f64 + f64::from(u8::from(gap)))
    }

    fn y(&self, node: u32) -> f64 {
        let chain = self.graph.analysis.order.chain(node);
        TOP + LANE * self.lanes.partition_point(|&lane| lane < chain) as f64
    }

    fn end(&self) -> f64 {
        LEFT + COLUMN * (self.columns.len() as f64 + f64::from(u8::from(self.resumes.is_some())))
    }

    fn svg(&self) -> String {
        let bars_at = TOP + LANE * self.lanes.len() as f64 + 6.0;
        let (width, height) = (self.end() + RIGHT, bars_at + 62.0);
        let mut svg = String::new();
        let _ = write!(
            svg,
            "<svg viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" role=\"img\" xmlns=\"http://www.w3.org/2000/svg\">"
        );
        self.lane_lines(&mut svg);
        self.drop_line(&mut svg, bars_at);
        self.edges(&mut svg);
        for &node in &self.columns {
            self.operation(&mut svg, node);
        }
        self.missing_edge(&mut svg);
        self.bar(&mut svg, self.hazard.first_lifetime, "first", bars_at);
        if self.hazard.recycled() {
            self.bar(&mut svg, self.hazard.second_lifetime, "second", bars_at + 28.0);
        }
        svg.push_str("</svg>");
        svg
    }

    fn lane_lines(&self, svg: &mut String) {
        for (index, &lane) in self.lanes.iter().enumerate() {
            let y = TOP + LANE * index as f64 + 10.0;
            let _ = write!(
                svg,
                "<line class=\"lane\" x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{y:.0}\" y2=\"{y:.0}\"/><text x=\"4\" y=\"{:.0}\">{}</text>",
                self.end(),
                y + 4.0,
                escape(&self.lane_name(lane))
            );
        }
        if let Some(resumes) = self.resumes {
            let skipped = resumes - (self.hazard.first + AROUND) - 1;
            let (x, bottom) = (self.x(resumes) - COLUMN / 2.0 - 4.0, TOP + LANE * self.lanes.len() as f64);
            let _ = write!(
                svg,
                "<g class=\"gap\"><line x1=\"{x:.0}\" x2=\"{x:.0}\" y1=\"{TOP}\" y2=\"{bottom:.0}\"/><text x=\"{x:.0}\" y=\"{:.0}\">{skipped} more</text></g>",
                TOP - 10.0
            );
        }
    }

    fn lane_name(&self, lane: u32) -> String {
        let capture = &self.graph.capture;
        let member = self.columns.iter().find(|&&n| self.graph.analysis.order.chain(n) == lane);
        let stream = member.and_then(|&n| capture.nodes[n as usize].stream);
        stream.and_then(|s| capture.streams.get(s as usize)).cloned().unwrap_or_else(|| format!("chain {lane}"))
    }

    /// Where the host dropped the first tensor: from here on its bytes may be given away.
    fn drop_line(&self, svg: &mut String, bars_at: f64) {
        let tensor = &self.graph.capture.lifetimes[self.hazard.first_lifetime as usize];
        let Some(freed) = tensor.freed.as_ref().filter(|_| self.hazard.recycled()) else { return };
        let x = self.x(freed.node) - 4.0;
        let _ = write!(
            svg,
            "<g class=\"drop\"><line x1=\"{x:.0}\" x2=\"{x:.0}\" y1=\"{:.0}\" y2=\"{bars_at:.0}\"/><text x=\"{x:.0}\" y=\"{:.0}\">dropped</text></g>",
            TOP - 6.0,
            TOP - 10.0
        );
    }

    fn edges(&self, svg: &mut String) {
        for &(a, b) in &self.graph.capture.edges {
            let drawn = |n| self.columns.binary_search(&n).is_ok();
            if !drawn(a) || !drawn(b) || self.graph.analysis.order.chain(a) == self.graph.analysis.order.chain(b) {
                continue;
            }
            let _ = write!(svg, "<path class=\"edge\" d=\"{}\"/>", self.curve(a, b));
        }
    }

    /// From the end of one operation to the beginning of another.
    fn curve(&self, a: u32, b: u32) -> String {
        let (x1, y1, x2, y2) = (self.x(a) + BOX, self.y(a) + 10.0, self.x(b), self.y(b) + 10.0);
        let bend = ((x2 - x1).abs() / 3.0).clamp(12.0, 60.0);
        format!("M{x1:.0} {y1:.0} C{:.0} {y1:.0} {:.0} {y2:.0} {x2:.0} {y2:.0}", x1 + bend, x2 - bend)
    }

    fn operation(&self, svg: &mut String, node: u32) {
        let (class, letters) = match node {
            n if n == self.hazard.first => ("op first", FULL_NAME),
            n if n == self.hazard.second => ("op second", FULL_NAME),
            _ => ("op", NAME),
        };
        let kernel = &self.graph.capture.nodes[node as usize].kernel;
        let name = kernel.rsplit("::").next().unwrap_or(kernel);
        let mut short: String = name.chars().take(letters).collect();
        if short.len() < name.len() {
            short.push('…');
        }
        let (x, y) = (self.x(node), self.y(node));
        let (text_x, text_y) = (x + 6.0, y + 30.0);
        let _ = write!(
            svg,
            "<g class=\"{class}\"><title>{}</title><rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{BOX}\" height=\"20\" rx=\"3\"/><text x=\"{text_x:.0}\" y=\"{text_y:.0}\" transform=\"rotate(38 {text_x:.0} {text_y:.0})\">{}</text></g>",
            escape(&format!("node {node}: {kernel}")),
            escape(&short),
        );
    }

    fn missing_edge(&self, svg: &mut String) {
        let (a, b) = (self.hazard.first, self.hazard.second);
        let (x, y) = (self.x(b), self.y(b) + 10.0);
        let (middle_x, middle_y) = (f64::midpoint(self.x(a) + BOX, x), f64::midpoint(self.y(a) + 10.0, y));
        // Beside a steep edge, above a flat one.
        let (text_x, text_y) =
            if x - self.x(a) < 3.0 * COLUMN { (x + BOX + 24.0, middle_y) } else { (middle_x, middle_y - 6.0) };
        let _ = write!(
            svg,
            "<g class=\"missing\"><title>missing edge</title><path d=\"{}\"/><polygon points=\"{x:.0},{y:.0} {:.0},{:.0} {:.0},{:.0}\"/><text x=\"{text_x:.0}\" y=\"{text_y:.0}\">missing edge</text></g>",
            self.curve(a, b),
            x - 9.0,
            y - 5.0,
            x - 9.0,
            y + 5.0,
        );
    }

    fn bar(&self, svg: &mut String, lifetime: u32, class: &str, y: f64) {
        let Lifetime { name, allocated, freed, bytes, .. } = &self.graph.capture.lifetimes[lifetime as usize];
        let from = self.x(allocated.node);
        let to = freed.as_ref().map_or(self.end(), |site| self.x(site.node) - 4.0).max(from + 6.0);
        let label = format!("{name}  {:#x}..{:#x}", bytes.start, bytes.end);
        let room = self.end() + RIGHT - CHARACTER * label.chars().count() as f64;
        let _ = write!(
            svg,
            "<g class=\"bar {class}\"><rect x=\"{from:.0}\" y=\"{y:.0}\" width=\"{:.0}\" height=\"10\" rx=\"2\"/><text x=\"{:.0}\" y=\"{:.0}\">{}</text></g>",
            to - from,
            from.min(room).max(4.0),
            y + 21.0,
            escape(&label),
        );
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
