//! The taxonomy: every verdict, class and quirk, once.

/// The verdict on a response or a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Valid,
    /// Broken by the server: the numerator of the corruption rate.
    Corrupted,
    /// The transport failed; outside the denominator.
    Transport,
    /// The server refused; outside the denominator.
    Refused,
    /// Cut by a limit or an abort; outside the denominator.
    Incomplete,
}

macro_rules! named {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$doc])* #[serde(rename = $text)] $variant,)+ }
        impl $name {
            /// Every variant, in the order of the taxonomy.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];
            /// The name used in files.
            pub fn as_str(self) -> &'static str { match self { $(Self::$variant => $text,)+ } }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.as_str()) }
        }
    };
}

named! {
    /// The class of a response or a call.
    Class {
        /// An intact answer.
        Ok => "ok",
        /// A valid answer without a call.
        NoCall => "no_call",
        /// A well-formed call of a tool that nobody declared: the model's error, reported apart.
        ModelUnknownTool => "model_unknown_tool",
        /// No response or a 5xx status.
        HttpError => "http_error",
        /// Silence with the connection open.
        StreamStalled => "stream_stalled",
        /// 429 or 503.
        ServerRefused => "server_refused",
        /// Another 4xx.
        RequestRejected => "request_rejected",
        /// Another session's canary or tool was delivered.
        CrossSession => "cross_session",
        /// An error object under HTTP 200 or inside a stream.
        ErrorPayload => "error_payload",
        /// The body is no chat completion at all.
        BadEnvelope => "bad_envelope",
        /// One frame cannot be read.
        BadFrame => "bad_frame",
        /// The stream ended with neither a finish reason nor `[DONE]`.
        StreamTruncated => "stream_truncated",
        /// Loops, floods, token soup.
        Degenerate => "degenerate",
        /// Cut by the token limit.
        LengthCutoff => "length_cutoff",
        /// Aborted by the server.
        Aborted => "aborted",
        /// Content filter or an explicit refusal.
        ModelRefusal => "model_refusal",
        /// Call text in content or reasoning.
        MarkupLeak => "markup_leak",
        /// A call was announced, required or expected, and is absent.
        CallLost => "call_lost",
        /// Nothing at all came.
        EmptyResponse => "empty_response",
        /// An extra empty call, or a call under `tool_choice: none`.
        PhantomCall => "phantom_call",
        /// Argument text that belongs to no call.
        OrphanDelta => "orphan_delta",
        /// Two documents in one slot.
        CallMerged => "call_merged",
        /// Argument text sent more than once.
        ArgsDuplicated => "args_duplicated",
        /// The name never came.
        NameMissing => "name_missing",
        /// A declared name plus residue, illegal characters, or cut in mid-word.
        NameMangled => "name_mangled",
        /// Arguments that are no JSON text of an object.
        ArgsWrongShape => "args_wrong_shape",
        /// Replacement characters, lone surrogates, bytes that are not UTF-8.
        EncodingDamage => "encoding_damage",
        /// Text beside the argument object.
        ArgsExtraText => "args_extra_text",
        /// A proper prefix although the finish says complete.
        ArgsTruncated => "args_truncated",
        /// Not JSON.
        ArgsMalformed => "args_malformed",
        /// Empty although something is required.
        ArgsLost => "args_lost",
        /// Call markup inside a key or value, or beside an intact call.
        MarkupResidue => "markup_residue",
        /// A number, array or object delivered as a string.
        TypeStringified => "type_stringified",
        /// The schema says otherwise.
        SchemaViolation => "schema_violation",
        /// The oracle says otherwise.
        ValueAltered => "value_altered",
        /// Call deltas after the finish reason.
        LateDelta => "late_delta",
        /// Ids that do not tell calls apart.
        IdInvalid => "id_invalid",
    }
}

named! {
    /// A deviation that the verdict tolerates; each is counted and reported.
    Quirk {
        /// `finish_reason` is `stop` beside an intact call.
        FinishStop => "finish_stop",
        /// `finish_reason` never came although the answer ended properly.
        FinishMissing => "finish_missing",
        /// A finish reason that the protocol does not know, taken as complete.
        FinishUnknown => "finish_unknown",
        /// `[DONE]` never came.
        DoneMissing => "done_missing",
        /// The same function name came in more than one delta.
        NameResent => "name_resent",
        /// The function name came in pieces.
        NameFragmented => "name_fragmented",
        /// Arguments came before the name.
        LateName => "late_name",
        /// A delta carries a null or empty id beside a real one.
        IdBlank => "id_blank",
        /// The same id came in more than one delta.
        IdResent => "id_resent",
        /// Deltas without an index, told apart by their ids.
        IndexMissing => "index_missing",
        /// Indices do not start at 0 or leave gaps.
        IndexNotDense => "index_not_dense",
        /// Empty arguments for a tool that requires nothing.
        EmptyArgsForNoArgTool => "empty_args_for_no_arg_tool",
        /// An event with empty data.
        EmptyEvent => "empty_event",
        /// A call delta that carries nothing.
        EmptyDelta => "empty_delta",
        /// A keep-alive sent as data.
        NonjsonKeepalive => "nonjson_keepalive",
        /// A JSON event that is no chunk, such as a ping.
        UnknownEvent => "unknown_event",
        /// A line that is no field of the event stream format.
        UnknownField => "unknown_field",
        /// The last event was not ended by a blank line.
        EventUnterminated => "event_unterminated",
        /// A chunk repeats the whole answer as `message`.
        MessageInChunk => "message_in_chunk",
        /// Chunks of one stream carry different completion ids.
        ChunkIdVaries => "chunk_id_varies",
        /// More than one choice; only the first is judged.
        ExtraChoice => "extra_choice",
        /// A surrogate pair of the content was split between frames; it was joined.
        SurrogatesSplit => "surrogates_split",
        /// The content holds U+FFFD.
        ContentReplacementChar => "content_replacement_char",
        /// The content holds a control token of a chat template, without call text.
        ContentTemplateToken => "content_template_token",
        /// The arguments equal the dictated ones but are written differently.
        ArgsReserialized => "args_reserialized",
        /// The dictated calls came in another order.
        CallsReordered => "calls_reordered",
    }
}
