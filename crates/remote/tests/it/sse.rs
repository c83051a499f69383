//! Server-sent events do not depend on how the network splits the bytes.

use halo_remote::{SseParser, SseTooLong};
use proptest::prelude::*;

fn parse_events(bytes: &[u8], cuts: &[usize]) -> Vec<String> {
    let mut events = Vec::new();
    let mut sse = SseParser::default();
    let mut from = 0;
    for &to in cuts.iter().chain([&bytes.len()]) {
        sse.push(&bytes[from..to], &mut |e| events.push(e)).unwrap();
        from = to;
    }
    sse.finish(&mut |e| events.push(e));
    events.into_iter().map(|e| String::from_utf8_lossy(&e).into_owned()).collect()
}

#[test]
fn sse_parses_events() {
    let cases: [(&str, &[&str]); 15] = [
        ("data: a\n\n", &["a"]),
        ("data:a\n\ndata:  b\n\n", &["a", " b"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", &["a", "b"]),
        ("data: a\r\ndata: b\r\n\r\n", &["a\nb"]),
        ("data: a\r\rdata: b\r\r", &["a", "b"]),
        ("event: message\ndata: {\"x\": 1}\nid: 7\nretry: 5\n\n", &["{\"x\": 1}"]),
        (": a comment\n\n:\n\ndata: a\n\n", &["a"]),
        ("data: a\ndata: b\ndata:\ndata: c\n\n", &["a\nb\n\nc"]),
        ("data\n\n", &[""]),
        ("\n\n\ndata: a\n\n\n\n", &["a"]),
        ("database: a\n\n data: b\n\nDATA: c\n\n", &[]),
        ("\u{feff}data: 😀\n\ndata: \u{feff}\n\n", &["😀", "\u{feff}"]),
        // A complete line counts even if the stream ends there; an incomplete one does not.
        ("data: a\n", &["a"]),
        ("data: a\n\ndata: b", &["a"]),
        ("data: a\ndata: b", &[]),
    ];
    for (text, expected) in cases {
        assert_eq!(parse_events(text.as_bytes(), &[]), expected, "{text:?}");
        let everywhere: Vec<usize> = (0..text.len()).collect();
        assert_eq!(parse_events(text.as_bytes(), &everywhere), expected, "{text:?} byte by byte");
    }
}

#[test]
fn sse_refuses_lines_and_events_over_the_limit() {
    let parse = |bytes: &str| SseParser::with_limit(10).push(bytes.as_bytes(), &mut |_| {});
    assert_eq!(parse("data: 1234"), Ok(()));
    assert_eq!(parse("data: 12345"), Err(SseTooLong(10)));
    assert_eq!(parse("data:1\ndata:2\ndata:3\n\n"), Ok(()));
    assert_eq!(
        parse("data:1234\ndata:5678\ndata:9\n\n"),
        Err(SseTooLong(10)),
        "the limit covers all lines of an event"
    );
}

proptest! {
    #[test]
    fn sse_is_independent_of_byte_splits(
        lines in prop::collection::vec(prop_oneof!["", "data: ?[a-z😀é]{0,5}", ": ?[a-z]{0,3}", "event: m", "[a-z:😀]{0,6}"], 0..20),
        ends in prop::collection::vec(prop_oneof!["\n", "\r", "\r\n"], 20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let text: String = lines.iter().zip(&ends).flat_map(|(line, end)| [line.as_str(), end.as_str()]).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).collect();
        cuts.sort_unstable();
        prop_assert_eq!(parse_events(text.as_bytes(), &cuts), parse_events(text.as_bytes(), &[]));
    }
}
