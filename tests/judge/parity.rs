//! A call broken in one form only points at the server's parser.

use toolstorm::validate::{
    Class, Judgement, Observation, judge,
    parity::{Form, Forms, Suspect},
    record,
};

fn answer(arguments: &str) -> Judgement {
    let text = serde_json::to_string(arguments).unwrap();
    let body = format!(
        "{{\"choices\":[{{\"message\":{{\"tool_calls\":[{{\"id\":\"a\",\"function\":{{\"name\":\"f\",\"arguments\":{text}}}}}]}},\
         \"finish_reason\":\"tool_calls\"}}]}}"
    );
    let record = record::read("f", body.as_bytes()).unwrap().remove(0);
    judge(&Observation { http_status: 200, ..record.observation() }, &record.expectation)
}

#[test]
fn the_disagreement_points_at_whoever_made_the_broken_form() {
    let (good, bad, lost) = (answer("{\"a\": 1}"), answer("{\"a\": 1"), answer("{\"a\": 1}{\"b\": 2}"));
    assert_eq!((good.class, bad.class, lost.class), (Class::Ok, Class::ArgsTruncated, Class::CallMerged));
    let suspect = |forms: &[(Form, &Judgement)]| {
        let mut compared = Forms::default();
        forms.iter().for_each(|(form, judgement)| compared.add(*form, (*judgement).into()));
        compared.suspect()
    };
    for (forms, wanted) in [
        (vec![(Form::Streamed, &good), (Form::Unary, &good)], Suspect::Nobody),
        (vec![(Form::Streamed, &bad), (Form::Unary, &good)], Suspect::StreamParser),
        (vec![(Form::Streamed, &good), (Form::Unary, &bad), (Form::Raw, &good)], Suspect::UnaryParser),
        (vec![(Form::Streamed, &bad), (Form::Unary, &lost), (Form::Raw, &good)], Suspect::Parser),
        (vec![(Form::Streamed, &bad), (Form::Unary, &bad)], Suspect::Engine),
        (vec![(Form::Streamed, &good), (Form::Unary, &good), (Form::Raw, &bad)], Suspect::Unknown),
        (vec![(Form::Streamed, &bad)], Suspect::Unknown),
    ] {
        assert_eq!(suspect(&forms), wanted);
    }
}
