//! Inline SVG: one drawing that fits rates with their intervals and latencies with their spread alike.

use std::fmt::Write as _;

/// One row of a drawing.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// What it is.
    pub label: String,
    /// Left end.
    pub low: f64,
    /// The mark.
    pub middle: f64,
    /// Right end.
    pub high: f64,
    /// Whether it stands out.
    pub alarming: bool,
}

const LABEL: f64 = 240.0;
const WIDTH: f64 = 860.0;
const ROW: f64 = 24.0;

/// Rows of intervals over one axis that begins at zero.
pub fn bars(rows: &[Bar], unit: &str) -> String {
    let end = rows.iter().map(|row| row.high).fold(0.0, f64::max);
    if rows.is_empty() || end <= 0.0 && rows.iter().all(|row| row.high <= 0.0) {
        return String::new();
    }
    let step = tick(end);
    let end = (end / step).ceil() * step;
    let x = |value: f64| LABEL + (WIDTH - LABEL - 60.0) * value / end;
    let height = ROW * rows.len() as f64 + 34.0;
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" class=\"plot\">");
    let mut value = 0.0;
    while value <= end + step / 2.0 {
        let (at, bottom) = (x(value), height - 30.0);
        let _ = write!(
            svg,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"0\" y2=\"{bottom:.0}\" class=\"grid\"/><text x=\"{at:.1}\" y=\"{:.0}\" \
             class=\"tick\">{}{unit}</text>",
            bottom + 16.0,
            number(value)
        );
        value += step;
    }
    for (place, row) in rows.iter().enumerate() {
        let y = ROW * place as f64 + ROW / 2.0;
        let class = if row.alarming { "alarming" } else { "calm" };
        let _ = write!(
            svg,
            "<g class=\"{class}\"><text x=\"{:.0}\" y=\"{:.1}\" class=\"label\">{}</text>\
             <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y}\" y2=\"{y}\"/><circle cx=\"{:.1}\" cy=\"{y}\" r=\"4\"/>\
             <title>{}: {} ({} to {}){unit}</title></g>",
            LABEL - 10.0,
            y + 4.0,
            escape(&row.label),
            x(row.low),
            x(row.high),
            x(row.middle),
            escape(&row.label),
            number(row.middle),
            number(row.low),
            number(row.high),
        );
    }
    svg.push_str("</svg>");
    svg
}

/// A line over time with its interval, oldest first.
pub fn trend(points: &[Bar], unit: &str) -> String {
    let end = points.iter().map(|point| point.high).fold(0.0, f64::max);
    if points.len() < 2 || end <= 0.0 {
        return String::new();
    }
    let (width, height) = (WIDTH - 80.0, 180.0);
    let x = |place: usize| 60.0 + width * place as f64 / (points.len() - 1) as f64;
    let y = |value: f64| 10.0 + height * (1.0 - value / end);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" class=\"plot\">", height + 40.0);
    for part in [0.0, 0.5, 1.0] {
        let (at, value) = (y(end * part), number(end * part));
        let _ = write!(
            svg,
            "<line x1=\"60\" x2=\"{:.0}\" y1=\"{at:.1}\" y2=\"{at:.1}\" class=\"grid\"/>\
             <text x=\"54\" y=\"{:.1}\" class=\"label\">{value}{unit}</text>",
            60.0 + width,
            at + 4.0
        );
    }
    let line: Vec<_> =
        points.iter().enumerate().map(|(place, point)| format!("{:.1},{:.1}", x(place), y(point.middle))).collect();
    let _ = write!(svg, "<polyline points=\"{}\" class=\"line\"/>", line.join(" "));
    for (place, point) in points.iter().enumerate() {
        let class = if point.alarming { "alarming" } else { "calm" };
        let at = x(place);
        let _ = write!(
            svg,
            "<g class=\"{class}\"><line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
             <circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"4\"/><title>{}: {}{unit}</title></g>",
            y(point.low),
            y(point.high),
            y(point.middle),
            escape(&point.label),
            number(point.middle)
        );
    }
    svg.push_str("</svg>");
    svg
}

/// A round step that gives four to ten ticks.
fn tick(end: f64) -> f64 {
    let magnitude = 10f64.powf((end / 5.0).log10().floor());
    let scaled = end / 5.0 / magnitude;
    magnitude
        * if scaled > 5.0 {
            10.0
        } else if scaled > 2.0 {
            5.0
        } else if scaled > 1.0 {
            2.0
        } else {
            1.0
        }
}

/// Three significant digits.
fn number(value: f64) -> String {
    let digits = if value >= 100.0 || value == 0.0 { 0 } else { (2 - value.log10().floor() as i32).clamp(0, 6) };
    let text = format!("{value:.*}", digits as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(middle: f64) -> Bar {
        Bar { label: "a<b".into(), low: 0.0, middle, high: middle * 2.0, alarming: false }
    }

    #[test]
    fn drawings_are_closed_and_escaped() {
        for svg in [bars(&[bar(3.0), bar(7.5)], "%"), trend(&[bar(3.0), bar(7.5)], "%")] {
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>"));
            assert!(svg.contains("a&lt;b") && !svg.contains("a<b") && !svg.contains("NaN"));
        }
        assert_eq!(bars(&[], "%"), "");
        assert_eq!(bars(&[bar(0.0)], "%"), "");
    }

    #[test]
    fn ticks_and_numbers_are_round() {
        for (end, step) in [(10.0, 2.0), (9.0, 2.0), (1.0, 0.2), (55.0, 20.0), (300.0, 100.0)] {
            assert!((tick(end) - step).abs() < 1e-9, "{end}: {}", tick(end));
        }
        assert_eq!([number(0.0), number(12.5), number(0.25), number(1234.0)], ["0", "12.5", "0.25", "1234"]);
    }
}
