//! SARIF 2.1.0 for code-review tools: one result per cause and graph, at the line that dropped the tensor.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::hazard::{Graph, Kind, Likelihood, Report, Site, cause::Cause};

/// The report as a SARIF log.
pub fn document(report: &Report) -> Value {
    let mut results: Vec<Value> =
        report.graphs.iter().flat_map(|g| g.causes.iter().map(move |c| result(g, c))).collect();
    for clobber in &report.clobbers {
        results.push(json!({
            "ruleId": "clobber",
            "level": "error",
            "message": { "text": clobber.why },
            "locations": [{ "logicalLocations": [{ "fullyQualifiedName": clobber.tensor, "kind": "object" }] }],
        }));
    }
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "toolstorm",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": rules(),
            } },
            "invocations": [{
                "executionSuccessful": report.missing == 0,
                "toolExecutionNotifications": notifications(report),
            }],
            "results": results,
        }],
    })
}

/// What a reader should know of the report and of each graph.
fn notifications(report: &Report) -> Vec<Value> {
    let note = |text: String| json!({ "level": "warning", "message": { "text": text } });
    let ours = report.warnings.iter().cloned();
    let of = |graph: &Graph| {
        let title = graph.full_name();
        graph.capture.warnings.iter().map(|warning| format!("{title}: {warning}")).collect::<Vec<_>>()
    };
    ours.chain(report.graphs.iter().flat_map(of)).map(note).collect()
}

fn rules() -> Value {
    let rule = |id: &str, text: &str| json!({ "id": id, "shortDescription": { "text": text } });
    json!([
        rule(Kind::War.label(), "an operation may overwrite bytes that an unordered one still reads"),
        rule(Kind::Raw.label(), "an operation may read bytes before an unordered one has written them"),
        rule(Kind::Waw.label(), "two unordered operations write the same bytes"),
        rule(
            Kind::Touch.label(),
            "two unordered operations touch the same bytes, at least one of them perhaps writing"
        ),
        rule("clobber", "a replay writes over bytes that a later reader expects unchanged"),
    ])
}

fn result(graph: &Graph, cause: &Cause) -> Value {
    let hazard = &graph.analysis.hazards[cause.hazards[0]];
    let [first, second] = [hazard.first_lifetime, hazard.second_lifetime].map(|l| &graph.capture.lifetimes[l as usize]);
    let fixes: Vec<&str> = cause.fixes.iter().filter(|f| f.verified()).map(|f| f.what.as_str()).collect();
    let cure = if fixes.is_empty() { String::new() } else { format!(" To fix it, {}.", fixes.join(", or ")) };
    let names = [hazard.first, hazard.second].map(|n| {
        let node = &graph.capture.nodes[n as usize];
        json!({ "name": node.kernel, "fullyQualifiedName": format!("{}/{n}/{}", graph.full_name(), node.kernel), "kind": "function" })
    });
    let dropped = first.freed.as_ref().unwrap_or(&first.allocated);
    let mut location = physical(dropped).unwrap_or_else(|| json!({}));
    location["logicalLocations"] = json!(names);
    let reused = hazard.recycled().then_some((&second.allocated, "its bytes are given to another tensor here"));
    let allocated = (&first.allocated, "the tensor is allocated here");
    let related = std::iter::once(allocated).chain(reused).filter_map(|(site, text)| {
        let mut place = physical(site)?;
        place["message"] = json!({ "text": text });
        Some(place)
    });
    let kernels = [hazard.first, hazard.second].map(|n| graph.capture.nodes[n as usize].kernel.as_str());
    let title = graph.full_name();
    // A group may be called by the number of its process, which is another in every run.
    let fingerprint = [&[graph.capture.name.as_str(), cause.tensor.as_str()][..], &kernels].concat();
    json!({
        "ruleId": hazard.kind.label(),
        "level": if hazard.likelihood <= Likelihood::Likely { "error" } else { "warning" },
        "message": { "text": format!("{}.{cure}", cause.why) },
        "locations": [location],
        "relatedLocations": related.collect::<Vec<_>>(),
        "partialFingerprints": { "cause/v1": fingerprint.join("/") },
        "properties": { "hazards": cause.hazards.len(), "graph": title, "likelihood": hazard.likelihood.label() },
    })
}

fn physical(site: &Site) -> Option<Value> {
    let (file, line) = site.frames.iter().find_map(|f| Some((f.file.as_ref()?, f.line)))?;
    Some(json!({ "physicalLocation": {
        "artifactLocation": { "uri": uri(file) },
        "region": { "startLine": line.max(1) },
    } }))
}

/// A path as a URI reference: an absolute one with its scheme, and whatever a URI cannot hold as percent and digits.
fn uri(path: &str) -> String {
    let mut uri = if path.starts_with('/') { "file://".to_owned() } else { String::new() };
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' => uri.push(byte as char),
            _ => {
                let _ = write!(uri, "%{byte:02X}");
            }
        }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_uri_references() {
        assert_eq!(uri("/srv/my model/a.py"), "file:///srv/my%20model/a.py");
        assert_eq!(uri("ops/ä.py"), "ops/%C3%A4.py");
    }
}
