//! A minimal graph for each kind of hazard, and its nearest harmless neighbour.

use toolstorm::{
    device::Region,
    hazard::{Access, Benign, Capture, Graph, Kind, Lifetime, Likelihood, Node, Site, Touch, examine, fix::Remedy},
};

/// Two streams, `main` and `side`; lifetimes and touches by hand.
pub(crate) struct Sketch(pub(crate) Capture);

impl Sketch {
    pub(crate) fn new(name: &str) -> Self {
        let streams = vec!["main".to_owned(), "side".to_owned()];
        Self(Capture { name: name.to_owned(), streams, ..Capture::default() })
    }

    pub(crate) fn op(mut self, kernel: &str, stream: u32) -> Self {
        let at = self.0.nodes.len() as u32;
        let before = self.0.nodes.iter().rposition(|n| n.stream == Some(stream));
        self.0.edges.extend(before.map(|b| (b as u32, at)));
        self.0.nodes.push(Node { kernel: kernel.to_owned(), stream: Some(stream), ..Node::default() });
        self
    }

    pub(crate) fn wait(mut self, from: u32, to: u32) -> Self {
        self.0.edges.push((from, to));
        self
    }

    pub(crate) fn tensor(mut self, name: &str, bytes: std::ops::Range<u64>, alive: std::ops::Range<u32>) -> Self {
        let site = |node| Site { node, frames: Vec::new() };
        self.0.lifetimes.push(Lifetime {
            name: name.to_owned(),
            key: self.0.lifetimes.len() as u64,
            bytes,
            stream: Some(0),
            allocated: site(alive.start),
            freed: Some(site(alive.end)),
            inside: true,
            untraced: false,
        });
        self
    }

    pub(crate) fn touch(mut self, node: u32, lifetime: u32, access: Access) -> Self {
        let bytes = self.0.lifetimes[lifetime as usize].bytes.clone();
        let region = Region::contiguous(bytes.start, bytes.end - bytes.start);
        self.0.touches.push(Touch { node, lifetime, region, access, sure: true, firm: true });
        self.0.touches.sort_by_key(|t| t.node);
        self
    }

    fn graph(self) -> Graph {
        examine(self.0).expect("a sound graph")
    }
}

/// `produce` on main, `use` on side (waiting for it), `reuse` on main, `join` on main.
fn recycled(used: Access, reused: Access) -> Sketch {
    Sketch::new("recycled")
        .op("produce", 0)
        .op("use", 1)
        .op("reuse", 0)
        .op("join", 0)
        .wait(0, 1)
        .wait(1, 3)
        .tensor("scratch", 0..1024, 0..2)
        .tensor("next", 0..512, 2..4)
        .touch(0, 0, Access::Write)
        .touch(1, 0, used)
        .touch(2, 1, reused)
}

#[test]
fn write_after_read() {
    let graph = recycled(Access::Read, Access::Write).graph();
    let [hazard] = graph.analysis.hazards.as_slice() else { panic!("{:?}", graph.analysis.hazards) };
    assert_eq!((hazard.kind, hazard.first, hazard.second), (Kind::War, 1, 2));
    assert_eq!((hazard.bytes.clone(), hazard.shared, hazard.likelihood), (0..512, 512, Likelihood::Certain));
    assert_eq!(
        graph.causes[0].why,
        "`reuse` on main may write bytes that `use` on side still reads: `scratch` was dropped before main joined the \
         stream that uses it"
    );
    let remedies: Vec<Remedy> = graph.causes[0].fixes.iter().filter(|f| f.verified()).map(|f| f.remedy).collect();
    assert_eq!(remedies, [Remedy::HoldUntilJoin, Remedy::PersistentBuffer, Remedy::RecordStream, Remedy::Event]);
}

#[test]
fn read_after_write() {
    // Side writes the result, main reads it without waiting.
    let graph = Sketch::new("raw")
        .op("fork", 0)
        .op("produce", 1)
        .op("consume", 0)
        .wait(0, 1)
        .tensor("result", 0..64, 0..3)
        .touch(1, 0, Access::Write)
        .touch(2, 0, Access::Read)
        .graph();
    let [hazard] = graph.analysis.hazards.as_slice() else { panic!("{:?}", graph.analysis.hazards) };
    assert_eq!((hazard.kind, hazard.recycled()), (Kind::Raw, false));
    assert!(graph.causes[0].why.contains("may read `result` before `produce` on side has written it"));
    let remedies: Vec<Remedy> = graph.causes[0].fixes.iter().map(|f| f.remedy).collect();
    assert_eq!(remedies, [Remedy::Event], "nothing but an event orders two uses of one tensor");
    assert!(graph.causes[0].fixes[0].verified());
}

#[test]
fn write_after_write() {
    let graph = recycled(Access::Write, Access::Write).graph();
    let kinds: Vec<Kind> = graph.analysis.hazards.iter().map(|h| h.kind).collect();
    assert_eq!(kinds, [Kind::Waw]);
}

#[test]
fn a_persistent_buffer_is_priced_as_it_was_verified() {
    let sketch = recycled(Access::Read, Access::Write);
    let again = sketch
        .op("produce", 0)
        .op("use", 1)
        .op("reuse", 0)
        .wait(4, 5)
        .tensor("scratch", 2048..3072, 4..6)
        .tensor("next", 2048..2560, 6..7)
        .touch(4, 2, Access::Write)
        .touch(5, 2, Access::Read)
        .touch(6, 3, Access::Write);
    let graph = again.graph();
    let [cause] = graph.causes.as_slice() else { panic!("{:?}", graph.causes) };
    let fix = cause.fixes.iter().find(|f| f.remedy == Remedy::PersistentBuffer).expect("it applies");
    assert!(fix.verified());
    assert_eq!(fix.what, "allocate `scratch` before the capture, one for each of its 2 allocations");
    assert_eq!(fix.extra_bytes, 2 * 1024);
}

#[test]
fn fixes_of_the_first_mistakes_are_tried() {
    let mut sketch = Sketch::new("many").op("fork", 0);
    for mistake in 0..60 {
        let at = mistake as u32 * 2 + 1;
        let bytes = mistake * 64..mistake * 64 + 64;
        sketch = sketch.op("produce", 1).op("consume", 0).tensor(&format!("t{mistake}"), bytes, 0..200);
        sketch = sketch.touch(at, mistake as u32, Access::Write).touch(at + 1, mistake as u32, Access::Read);
    }
    let graph = sketch.graph();
    assert_eq!(graph.causes.len(), 60);
    assert_eq!(graph.causes.iter().take_while(|c| !c.fixes.is_empty()).count(), 50);
    assert_eq!(graph.capture.warnings, ["mistakes whose fixes were not tried: 10"]);
}

#[test]
fn unknown_touches() {
    let mut sketch = recycled(Access::Unknown, Access::Unknown);
    for touch in &mut sketch.0.touches {
        touch.sure = false;
    }
    let graph = sketch.graph();
    let [hazard] = graph.analysis.hazards.as_slice() else { panic!("{:?}", graph.analysis.hazards) };
    assert_eq!((hazard.kind, hazard.likelihood), (Kind::Touch, Likelihood::Possible));
}

#[test]
fn harmless_neighbours_are_clean() {
    let clean = |sketch: Sketch, what: &str| {
        assert_eq!(sketch.graph().analysis.hazards, [], "{what}");
    };
    clean(recycled(Access::Read, Access::Read), "two readers");
    clean(recycled(Access::Read, Access::Write).wait(1, 2), "an event between the two");
    let mut apart = recycled(Access::Read, Access::Write);
    let reuse = apart.0.touches.iter_mut().find(|t| t.node == 2).expect("the reuser's touch");
    reuse.region = Region::contiguous(512, 0);
    clean(apart, "no bytes");
    let mut columns = recycled(Access::Read, Access::Write);
    // The reader takes the right half of each row, the writer the left half: exact rows decide.
    for touch in columns.0.touches.iter_mut().filter(|t| t.node > 0) {
        let base = if touch.node == 1 { 32 } else { 0 };
        touch.region = Region { base, row_stride: 64, len: 32, rows: 8 };
    }
    clean(columns, "interleaved rows");
}

#[test]
fn benign_bytes_are_counted_and_not_reported() {
    let mut sketch = recycled(Access::Read, Access::Write);
    sketch.0.benign.push(Benign { bytes: 0..512, reason: "page 0".to_owned() });
    let graph = sketch.graph();
    assert_eq!((graph.analysis.hazards.len(), graph.analysis.benign), (0, 1));
    let mut partly = recycled(Access::Read, Access::Write);
    partly.0.benign.push(Benign { bytes: 0..500, reason: "page 0".to_owned() });
    let graph = partly.graph();
    assert_eq!((graph.analysis.hazards[0].bytes.clone(), graph.analysis.benign), (500..512, 0));
}

#[test]
fn a_hazard_bites_where_durations_say_so() {
    use toolstorm::hazard::bite::Bite;
    let charged = |used: f64, before_reuse: f64| {
        let mut sketch = recycled(Access::Read, Access::Write);
        for (node, duration) in sketch.0.nodes.iter_mut().zip([1.0, used, 1.0, 1.0]) {
            node.duration_us = Some(duration);
        }
        sketch.0.nodes[0].duration_us = Some(1.0);
        // A delay on main between the producer and the reuser.
        let mut sketch = sketch.op("delay", 0).wait(0, 4).wait(4, 2);
        sketch.0.edges.retain(|e| *e != (3, 4));
        sketch.0.nodes[4].duration_us = Some(before_reuse);
        let graph = sketch.graph();
        graph.schedule.expect("all durations are charged").estimate(&graph.analysis.hazards[0])
    };
    assert_eq!(charged(20.0, 1.0).bite, Bite::Likely);
    assert_eq!(charged(20.0, 21.0).bite, Bite::Possible);
    let latent = charged(2.0, 40.0);
    assert_eq!(latent.bite, Bite::Latent);
    assert!((latent.slack_us - 39.0).abs() < 1e-9, "{latent:?}");
}
