//! Several graphs in one pool.

use toolstorm::hazard::{
    Access, Capture,
    replay::{Outputs, replay},
};

use crate::golden::Sketch;

/// `encode` leaves `state` in the pool, `decode` reads it, `draft` was captured after `state` had been dropped.
fn pool() -> [Capture; 3] {
    let mut encode = Sketch::new("encode").op("write", 0).tensor("state", 0..256, 0..1).touch(0, 0, Access::Write).0;
    encode.lifetimes[0].freed = None;
    let mut decode = Sketch::new("decode").op("read", 0).tensor("state", 0..256, 0..1).touch(0, 0, Access::Read).0;
    decode.lifetimes[0].inside = false;
    let mut draft = Sketch::new("draft").op("scribble", 0).tensor("noise", 128..512, 0..1).touch(0, 0, Access::Write).0;
    draft.lifetimes[0].key = 9;
    [encode, decode, draft]
}

#[test]
fn the_order_of_capture_is_sound() {
    assert_eq!(replay(&pool(), &[0, 1, 2, 0, 1, 2], Outputs::AtOnce).unwrap(), []);
}

#[test]
fn another_order_writes_over_what_is_still_read() {
    let found = replay(&pool(), &[0, 2, 1], Outputs::AtOnce).unwrap();
    let [clobber] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(
        (clobber.graph, clobber.by, clobber.tensor.as_str(), clobber.bytes.clone()),
        (1, Some(2), "state", 128..256)
    );
    assert!(clobber.why.contains("`decode` reads `state`") && clobber.why.contains("`draft`"), "{}", clobber.why);
}

#[test]
fn a_reader_replayed_before_its_writer_is_named() {
    let found = replay(&pool(), &[1, 0], Outputs::AtOnce).unwrap();
    assert_eq!(found.len(), 1);
    assert!(found[0].why.contains("before the graph that writes it"), "{}", found[0].why);
}

#[test]
fn outputs_read_after_the_next_replay() {
    assert_eq!(replay(&pool(), &[0, 2], Outputs::AtOnce).unwrap(), []);
    let found = replay(&pool(), &[0, 2], Outputs::AfterNext).unwrap();
    assert_eq!(found.len(), 1);
    assert!(found[0].why.contains("`state` of `encode` is read after `draft`"), "{}", found[0].why);
}

#[test]
fn a_buffer_cached_in_warm_up_and_freed_later() {
    let mut graphs = pool();
    graphs[1].alive = Some([graphs[1].lifetimes[0].key].into());
    graphs[2].alive = Some([77].into());
    let found = replay(&graphs, &[], Outputs::AtOnce).unwrap();
    assert_eq!(found.len(), 1);
    assert!(found[0].why.contains("`decode` still uses `state`, which was freed before `draft`"), "{}", found[0].why);
}

#[test]
fn a_freed_buffer_that_the_graph_writes_first_is_named_too() {
    let mut graphs = pool();
    graphs[1].touches[0].access = Access::Write;
    graphs[2].alive = Some([77].into());
    let found = replay(&graphs, &[], Outputs::AtOnce).unwrap();
    assert!(found.len() == 1 && found[0].why.contains("`decode` still uses `state`"), "{found:?}");
}

#[test]
fn a_buffer_freed_while_the_graph_is_captured() {
    let mut decode = pool()[1].clone();
    decode.lifetimes[0].freed = Some(toolstorm::hazard::Site::default());
    let found = replay(&[decode.clone()], &[], Outputs::AtOnce).unwrap();
    assert!(found.len() == 1 && found[0].why.contains("which was freed while it was captured"), "{found:?}");
    // What an earlier graph leaves in the pool stays the pool's.
    assert_eq!(replay(&[pool()[0].clone(), decode.clone()], &[], Outputs::AtOnce).unwrap(), []);
    decode.touches.clear();
    assert_eq!(replay(&[decode], &[], Outputs::AtOnce).unwrap(), [], "nothing of the graph uses it");
}

#[test]
fn a_graph_that_was_not_given_is_an_error() {
    assert!(replay(&pool(), &[3], Outputs::AtOnce).unwrap_err().to_string().contains("names graph 3"));
}
