"""Arguments and results survive storage unchanged, or are refused with the place of the fault."""

import datetime
import decimal
import enum
import json
import math
import sys
import uuid
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils.translation import gettext_lazy
from hypothesis import assume, example, given
from hypothesis import strategies as st

from relay_queue import payload
from relay_queue.exceptions import InvalidJob, PayloadError, ResultError

LIMITS = {"max_bytes": 1_048_576, "max_depth": 100}

# Hypothesis leaves lone surrogates out of its texts by default.
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
) | st.text()
keys = st.text(max_size=8)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)


other_keys = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none()
    | st.text()
)
values = st.recursive(scalars, containers, max_leaves=8)
several = st.lists(values, max_size=3)
named = st.dictionaries(keys, values, max_size=3)


def encode(*args: Any, **kwargs: Any) -> str:
    return payload.encode(args, kwargs, **LIMITS)


def refusal(*args: Any, **kwargs: Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        encode(*args, **kwargs)
    return caught.value


class TestRoundTrip:
    @given(several, named)
    @example(["\x00", "\u2028", "😀", "\\ud800"], {"\x00": -0.0})
    def test_decode_gives_back_what_was_encoded(self, args: list, kwargs: dict) -> None:
        text = payload.encode(args, kwargs, **LIMITS)
        back_args, back_kwargs = payload.decode(text)
        assert (back_args, back_kwargs) == (args, kwargs)
        # Equality is blind to types and to the sign of zero; the text is not.
        assert payload.encode(back_args, back_kwargs, **LIMITS) == text

    @given(named)
    def test_the_text_does_not_depend_on_the_order_of_keys(self, kwargs: dict) -> None:
        turned = dict(reversed(kwargs.items()))
        assert payload.encode([], turned, **LIMITS) == payload.encode([], kwargs, **LIMITS)

    @given(values)
    def test_the_text_is_printable_ascii_whatever_the_value(self, value: Any) -> None:
        text = payload.encode_result(value, **LIMITS)
        assert text.isascii()
        assert text.isprintable()
        assert json.loads(text) == value

    def test_the_text_is_compact_and_has_sorted_keys(self) -> None:
        assert encode(1, "é", b=None, a=[True]) == (
            '{"args":[1,"\\u00e9"],"kwargs":{"a":[true],"b":null}}'
        )

    def test_tuples_come_back_as_lists(self) -> None:
        assert payload.decode(encode((1, (2,)))) == ([[1, [2]]], {})

    def test_values_of_subclasses_are_stored_as_the_plain_values_they_equal(self) -> None:
        class Colour(enum.StrEnum):
            RED = "red"

        class Size(enum.IntEnum):
            BIG = 7

        point = namedtuple("point", "x y")(1, 2)
        value = [Colour.RED, Size.BIG, point, OrderedDict({Colour.RED: 1})]
        assert encode(*value) == '{"args":["red",7,[1,2],{"red":1}],"kwargs":{}}'

    def test_any_sequence_and_mapping_may_carry_the_arguments(self) -> None:
        text = payload.encode(range(2), OrderedDict(a=1), **LIMITS)
        assert payload.decode(text) == ([0, 1], {"a": 1})

    def test_the_largest_integer_that_every_worker_can_read_is_accepted(self) -> None:
        largest = 10**payload.MAX_INTEGER_DIGITS - 1
        assert payload.decode(encode(largest, -largest)) == ([largest, -largest], {})


class TestRefusal:
    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_not_finite_are_refused_with_their_path(self, number: float) -> None:
        error = refusal({"ok": 1}, users=[0, 1, 2, number])
        assert error.path == "kwargs['users'][3]"
        assert str(number) in str(error)

    @pytest.mark.parametrize("key", [1, 1.5, None, True, (1, 2), b"a"])
    def test_keys_that_are_not_strings_are_refused_and_never_turned_into_strings(
        self, key: Any
    ) -> None:
        error = refusal([{"a": {key: 1}}])
        assert error.path == "args[0][0]['a']"
        assert type(key).__name__ in str(error)

    @pytest.mark.parametrize(
        ("value", "hint"),
        [
            (datetime.datetime(2026, 1, 1), "isoformat"),
            (datetime.date(2026, 1, 1), "isoformat"),
            (datetime.time(1), "isoformat"),
            (datetime.timedelta(1), "total_seconds"),
            (decimal.Decimal(1), "str(value)"),
            (uuid.UUID(int=1), "str(value)"),
            (Path("a"), "str(value)"),
            (gettext_lazy("a"), "str(value)"),
            (b"a", "base64"),
            (bytearray(b"a"), "base64"),
            ({1}, "sorted(value)"),
            (frozenset({1}), "sorted(value)"),
            (enum.Enum("Kind", "A").A, ".value"),
            (User(pk=3), "primary key"),
            (User.objects.none(), "primary keys"),
            (object(), "JSON values only"),
            ((n for n in []), "list"),
        ],
    )
    def test_types_that_json_lacks_are_refused_with_the_way_out(
        self, value: Any, hint: str
    ) -> None:
        error = refusal(1, config={"when": value})
        assert error.path == "kwargs['config']['when']"
        assert type(value).__name__ in str(error)
        assert hint in str(error)

    @pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ude00"])
    def test_lone_surrogates_are_refused_in_values_and_in_keys(self, text: str) -> None:
        assert refusal("😀", [text]).path == "args[1][0]"
        assert refusal({"a": {text: 1}}).path == "args[0]['a']"

    def test_integers_that_a_worker_could_not_read_are_refused(self) -> None:
        assert refusal([10**payload.MAX_INTEGER_DIGITS]).path == "args[0][0]"
        assert refusal(n=-(10**payload.MAX_INTEGER_DIGITS)).path == "kwargs['n']"

    def test_long_integers_are_refused_where_python_was_told_to_write_them(self) -> None:
        usual = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            error = refusal(10**payload.MAX_INTEGER_DIGITS)
            encode(1, "9" * 5000)
        finally:
            sys.set_int_max_str_digits(usual)
        assert error.path == "args[0]"

    def test_circles_are_refused_with_their_path(self) -> None:
        circle: list[Any] = []
        circle += [1, circle, circle]
        assert refusal(a={"b": circle}).path == "kwargs['a']['b'][1]"
        ring: dict[str, Any] = {}
        ring["self"] = ring
        assert refusal(ring).path == "args[0]['self']"

    def test_containers_that_share_children_without_a_circle_are_accepted(self) -> None:
        shared = [1]
        assert payload.decode(encode(shared, shared)) == ([[1], [1]], {})

    def test_containers_that_multiply_by_sharing_are_refused_before_they_fill_the_memory(
        self,
    ) -> None:
        bomb: list[Any] = []
        for _ in range(60):
            bomb = [bomb, bomb]
        with pytest.raises(PayloadError, match="more than 1,000 bytes"):
            payload.encode([bomb], {}, max_bytes=1000, max_depth=100)

    @pytest.mark.parametrize("leaf", [[], {}, ()])
    def test_nesting_is_accepted_up_to_the_limit_and_refused_beyond(self, leaf: Any) -> None:
        limits = {"max_bytes": 1000, "max_depth": 2}
        assert payload.encode([[leaf]], {}, **limits)
        assert payload.encode([], {"a": {"b": leaf}}, **limits)
        assert payload.encode_result([[leaf]], **limits)
        for wrapped in ([[[leaf]]], [[[[leaf]]]]):
            with pytest.raises(PayloadError, match="limit is 2") as caught:
                payload.encode(wrapped, {}, **limits)
            assert caught.value.path == "args[0][0][0]"

    def test_a_structure_deeper_than_the_stack_is_refused(self) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        limits = {"max_bytes": 1_000_000, "max_depth": 1_000_000}
        with pytest.raises(PayloadError, match="cannot be stored as JSON"):
            payload.encode([deep], {}, **limits)

    def test_the_size_limit_counts_bytes_of_the_text(self) -> None:
        text = encode("é" * 10)
        exact = {"max_bytes": len(text.encode()), "max_depth": 5}
        assert payload.encode(["é" * 10], {}, **exact) == text
        with pytest.raises(PayloadError) as caught:
            payload.encode(["é" * 10 + "a"], {}, **exact)
        message = str(caught.value)
        assert f"{len(text) + 1} bytes" in message
        assert f"limit is {len(text)}" in message
        assert "reference" in message
        assert 'RELAY["MAX_PAYLOAD_BYTES"]' in message

    def test_a_refused_result_is_named_as_such(self) -> None:
        with pytest.raises(PayloadError) as caught:
            payload.encode_result({"a": [object()]}, **LIMITS)
        assert caught.value.path == "result['a'][0]"
        with pytest.raises(PayloadError, match="MAX_RESULT_BYTES"):
            payload.encode_result("x" * 100, max_bytes=64, max_depth=1)

    @given(st.dictionaries(other_keys, values, max_size=3))
    def test_keys_of_results_are_spelled_as_json_spells_them(self, value: Any) -> None:
        dumped = json.loads(json.dumps(value))
        assume(len(dumped) == len(value))
        assert json.loads(payload.encode_result(value, **LIMITS)) == dumped

    @pytest.mark.parametrize(
        ("value", "path", "what"),
        [
            ({1: "a", "1": "b"}, "result['1']", "there twice"),
            ({(1, 2): 3}, "result", "a key of type tuple"),
            ({math.inf: 1}, "result", "a key of type float"),
            ([b"\xff"], "result[0]", "not UTF-8"),
            ([range(10**9)], "", "more than"),
            (
                {1: {"a": datetime.date(2026, 1, 2)}},
                "result['1']['a']",
                r"Return value.isoformat\(\)\.$",
            ),
        ],
    )
    def test_a_result_that_nobody_takes_is_refused_with_its_path(
        self, value: Any, path: str, what: str
    ) -> None:
        with pytest.raises(ResultError, match=what) as caught:
            payload.encode_result(value, **LIMITS)
        assert caught.value.path == path

    def test_a_result_whose_own_code_raises_is_refused(self) -> None:
        class Broken(UserDict[str, int]):
            def __len__(self) -> int:
                raise RuntimeError("broken length")

        with pytest.raises(ResultError, match="cannot be stored as JSON: broken length"):
            payload.encode_result({"a": Broken()}, **LIMITS)

    def test_the_message_shows_no_value_and_only_the_start_of_a_long_key(self) -> None:
        message = str(refusal({"k" * 5000: {"password": b"hunter2"}}))
        assert "hunter2" not in message
        assert len(message) < 400

    def test_a_refusal_is_an_invalid_job(self) -> None:
        assert isinstance(refusal(object()), InvalidJob)


class TestDecode:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "nonsense",
            "[]",
            "null",
            '{"args":[]}',
            '{"args":[],"kwargs":[]}',
            '{"args":{},"kwargs":{}}',
            '{"args":[],"kwargs":{},"more":1}',
            '{"args":[NaN],"kwargs":{}}',
            '{"args":[-Infinity],"kwargs":{}}',
            '{"args":[],"kwargs":{}} ,',
            '{"args":[' + "9" * 5000 + '],"kwargs":{}}',
            '{"args":' + "[" * 100_000 + "]" * 100_000 + ',"kwargs":{}}',
            b'{"args":[],"kwargs":{}}',
            None,
        ],
    )
    def test_a_text_that_is_not_a_payload_is_refused(self, text: Any) -> None:
        with pytest.raises(PayloadError):
            payload.decode(text)

    @given(st.text())
    def test_any_text_is_decoded_or_refused_and_nothing_else(self, text: str) -> None:
        try:
            payload.decode(text)
        except PayloadError:
            return
        assert json.loads(text).keys() == {"args", "kwargs"}


fields = st.tuples(st.text(), st.text(), st.text(), st.text(), st.none() | st.text())


class TestChecksum:
    def test_it_is_stable_across_releases(self) -> None:
        # Changing the encoding would condemn every stored job.
        assert payload.checksum("q", "b", "t", "{}", None) == 2_538_700_012
        assert payload.checksum("q", "b", "t", "{}", "k") == 5_519_588

    @given(fields)
    def test_it_is_an_unsigned_32_bit_number(self, job: tuple) -> None:
        assert 0 <= payload.checksum(*job) < 2**32

    # The alphabet holds what the encoding itself is made of, where a confusion would hide.
    @given(*[st.tuples(*[st.text("01:-a", max_size=4)] * 4, st.none() | st.text("01:-a"))] * 2)
    @example(("a", "bc", "", "", None), ("ab", "c", "", "", None))
    @example(("a", "b", "c", "d", None), ("a", "b", "c", "d", ""))
    @example(("a", "b", "c", "d", None), ("a", "b", "c", "d-", None))
    @example(("a", "b", "c", "d", "-"), ("a", "b", "c", "d", None))
    def test_different_jobs_never_share_the_bytes_it_is_computed_over(
        self, left: tuple, right: tuple
    ) -> None:
        first, second = (
            payload._signed_head(*job[:3]) + payload._signed_tail(*job[3:]) for job in (left, right)
        )
        equal = first == second
        assert equal == (left == right)

    @given(fields, st.integers(0, 3), st.integers(0, 0x7F))
    def test_a_changed_character_is_noticed(self, job: tuple, index: int, code: int) -> None:
        altered = list(job)
        altered[index] = job[index][:-1] + chr(code)
        same_job = altered[index] == job[index]
        assert (payload.checksum(*altered) == payload.checksum(*job)) == same_job

    def test_texts_that_are_not_unicode_have_a_checksum_too(self) -> None:
        assert payload.checksum("\ud800", "b", "t", "{}", None) != payload.checksum(
            "?", "b", "t", "{}", None
        )


class Hostile:
    """An object that cannot be shown."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


class TestCleanText:
    @given(st.text(st.characters()) | st.text("\x00\ud800\udfffa"), st.integers(-1, 80))
    def test_it_is_storable_and_within_the_limit(self, text: str, limit: int) -> None:
        clean = payload.clean_text(text, limit)
        assert len(clean) <= max(limit, 0)
        assert "\x00" not in clean
        clean.encode()

    @given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
    def test_a_storable_text_within_the_limit_is_kept_as_it_is(self, text: str) -> None:
        assert payload.clean_text(text, len(text)) == text

    @given(st.integers(41, 2000), st.integers(40, 300))
    def test_the_marker_says_how_much_was_cut_and_both_ends_are_kept(
        self, length: int, limit: int
    ) -> None:
        text = ("abcdefghij" * 200)[:length]
        clean = payload.clean_text(text, limit)
        if length <= limit:
            assert clean == text
            return
        head, _, rest = clean.partition(" … [")
        count, _, tail = rest.partition(" characters cut] … ")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head) + int(count.replace(",", "")) + len(tail) == length

    @pytest.mark.parametrize(
        "error", [ValueError("no"), RecursionError(), MemoryError(), SystemExit(3), TypeError()]
    )
    def test_an_object_whose_str_raises_is_named(self, error: BaseException) -> None:
        assert "Hostile" in payload.clean_text(Hostile(error), 200)

    def test_a_str_that_returns_no_string_is_named(self) -> None:
        class Wrong:
            def __str__(self) -> str:
                return 3  # type: ignore[return-value]  # noqa: PLE0307

        assert "Wrong" in payload.clean_text(Wrong(), 200)

    def test_a_subclass_of_str_cannot_interfere(self) -> None:
        class Loud(str):
            __slots__ = ()

            def __len__(self) -> int:
                raise ValueError

            def __getitem__(self, index: Any) -> str:
                raise ValueError

        assert payload.clean_text(Loud("quiet"), 3) == "qui"

    def test_a_huge_text_is_cut_before_it_is_cleaned(self, monkeypatch: Any) -> None:
        seen: list[int] = []

        class Spy:
            def sub(self, _replacement: str, text: str) -> str:
                seen.append(len(text))
                return text

        monkeypatch.setattr(payload, "_UNSTORABLE", Spy())
        payload.clean_text("\x00" * 50_000_000, 500)
        assert seen == [500]
