"""What of a schema is followed, and which place is at fault if not all of it can be."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from mars_ray.decode.structured_output import SchemaFault, followed

TEXT = {"type": "string"}


def of(part: Any, **others: Any) -> dict:
    """An object with such a property."""
    return {"type": "object", "properties": {"p": part}, "required": ["p"], **others}


def fault(schema: dict) -> str:
    made = followed(json.dumps(schema), is_strict=True)
    assert isinstance(made, SchemaFault), made
    return ".".join(map(str, made.place))


def loosely(schema: dict) -> dict:
    """The schema as it is followed without `strict`; it compiles."""
    made = followed(json.dumps(schema), is_strict=False)
    assert isinstance(made, str)
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {made}"))
    return {name: value for name, value in json.loads(made).items() if name != "x-guidance"}


# What only describes, in the words of pydantic, zod, OpenAPI, Java and .NET.
DESCRIBING = {
    "title": "P",
    "description": "d",
    "$comment": "c",
    "examples": ["a"],
    "example": "a",
    "default": "x",
    "readOnly": True,
    "writeOnly": True,
    "deprecated": True,
    "nullable": True,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {"format": "path", "not": {}},
    "discriminator": {"propertyName": "kind"},
    "externalDocs": {"url": "https://example.org"},
    "xml": {"name": "p"},
    "x-order": 1,
    "x-enumNames": ["A"],
    "enumDescriptions": ["a"],
    "markdownDescription": "d",
    "propertyOrdering": ["p"],
    "$schema": "https://spec.openapis.org/oas/3.1/dialect/base",
    "$id": "::none",
    "id": "urn:jsonschema:org:example:P",
    "$anchor": "a",
    "strict": True,
}
# What allows everything.
IDLE = {
    "propertyNames": {"type": "string"},
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "not": False,
    "minContains": 0,
}
# What some serializers write of a keyword that is not set.
NULLS = dict.fromkeys(
    ("type", "format", "pattern", "enum", "items", "anyOf", "minimum", "required", "$ref"), None
)


@pytest.mark.parametrize(
    ("keyword", "value"), [*DESCRIBING.items(), *IDLE.items(), *NULLS.items(), ("properties", None)]
)
def test_what_constrains_nothing_is_no_fault(keyword, value):
    """Beside what does, and strictly."""
    text = {"minLength": 2, "maxLength": 3} | ({} if keyword == "type" else TEXT)
    assert isinstance(followed(json.dumps(of(text | {keyword: value})), is_strict=True), str)
    assert loosely(of(text | {keyword: value}))["properties"]["p"]["maxLength"] == 3


CANNOT = [
    ({**TEXT, "format": "path"}, "format"),
    ({"anyOf": [{**TEXT, "format": "binary"}, {"type": "null"}]}, "anyOf.0.format"),
    ({**TEXT, "pattern": "^(?=.*[A-Z]).{8,}$"}, "pattern"),
    ({**TEXT, "pattern": r"^(a)\1$"}, "pattern"),
    ({**TEXT, "pattern": "/^a$/i"}, "pattern"),
    ({"not": TEXT}, "not"),
    ({"if": {"minLength": 1}, "then": {"maxLength": 3}, "else": {}}, "if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "propertyNames": {"pattern": "^x-"}}, "propertyNames"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "additionalProperties": {"format": "a"}}, "additionalProperties.format"),
    ({"type": "object", "patternProperties": {"(?=a)": TEXT}}, "patternProperties"),
    ({"type": "object", "properties": {"a": "string"}}, "properties.a"),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": TEXT, "minContains": 1}, "contains"),
    ({"type": "array", "items": [TEXT, {**TEXT, "format": "a"}]}, "items.1.format"),
    ({"type": "array", "minItems": "1"}, "minItems"),
    ({"type": "any"}, "type"),
    ({"type": "STRING"}, "type"),
    ({"type": ["string", {"type": "null"}]}, "type"),
    ({"type": "number", "multipleOf": 0}, "multipleOf"),
    ({"type": "number", "maximum": 1.7976931348623157e308}, "maximum"),
    ({"$ref": "#/$defs/Nowhere"}, "$ref"),
    ({"$ref": "https://example.org/a.json"}, "$ref"),
    ({"$ref": "Label"}, "$ref"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "enum": "a"}, "enum"),
]


@pytest.mark.parametrize(("part", "place"), CANNOT, ids=[place for _, place in CANNOT])
def test_what_cannot_be_followed_is_named_and_the_rest_followed(part, place):
    """Beside another property, which stays as it was."""
    schema = of(part, additionalProperties=False)
    schema["properties"]["q"] = {"type": "integer", "minimum": 3}
    assert fault(schema) == f"properties.p.{place}"
    made = loosely(schema)
    assert made["properties"]["q"] == schema["properties"]["q"]
    assert made["additionalProperties"] is False
    if "type" in part and place != "type":
        assert made["properties"]["p"]["type"] == part["type"]


def test_a_fault_of_a_definition_is_found_there():
    """Not at a reference to it, by which alone it is reached."""
    odd = {"type": "object", "properties": {"b": {"type": "string", "format": "path"}}}
    for key in ("$defs", "definitions"):
        root = {"$ref": f"#/{key}/A", key: {"A": {"allOf": [{"$ref": f"#/{key}/B"}]}, "B": odd}}
        assert fault(root) == f"{key}.B.properties.b.format"


def test_parts_that_exclude_each_other_are_a_choice():
    """Also by reference, as pydantic's and NJsonSchema's are. Guards blame of an exclusive choice
    that can be followed for one beside it that cannot."""
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("Cat", "Dog")
    }
    pet = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}
    pet |= {"discriminator": {"propertyName": "kind"}}
    maybe = {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/Cat"}]}
    schema = of(pet, **{"$defs": kinds})
    schema["properties"]["maybe"] = maybe
    assert isinstance(followed(json.dumps(schema), is_strict=True), str)
    schema["properties"]["both"] = {"oneOf": [TEXT, {"minLength": 1}]}
    assert fault(schema) == "properties.both.oneOf"
    assert loosely(schema) == schema  # the library itself takes any part


def test_names_of_generic_types_are_references():
    """Brackets and spaces may not stand in a URI as they are."""
    for name in ("Page<Book>", "Page[Book]", "Map(String, Book)", "a/b", "a%b"):
        reference = name.replace("%", "%25").replace("/", "~1")
        schema = of({"$ref": f"#/$defs/{reference}"}, **{"$defs": {name: TEXT}})
        assert isinstance(followed(json.dumps(schema), is_strict=True), str), name


def test_recursive_schemas_are_followed():
    """Of the root, of a definition, of a property."""
    for there in ("#", "#/$defs/A", "#/properties/p"):
        part = {"type": "array", "items": {"$ref": there}}
        schema = of(part, **{"$defs": {"A": of(TEXT)}})
        assert isinstance(followed(json.dumps(schema), is_strict=True), str)


def test_names_of_properties_and_values_are_no_keywords():
    """A property may have any name, and a constant any value."""
    names = ("not", "uniqueItems", "$ref", "oneOf", "required", "const", "x-guidance")
    value = {"uniqueItems": False, "not": None, "format": "path"}
    schema = {"type": "object", "properties": dict.fromkeys(names, TEXT)}
    schema["properties"]["value"] = {"const": value}
    schema["properties"]["null"] = {"const": None}
    assert loosely(schema) == schema
    assert isinstance(followed(json.dumps(schema), is_strict=True), str)
    schema["properties"]["oneOf"] = {"type": "string", "format": "path"}
    assert fault(schema) == "properties.oneOf.format"


def test_what_is_too_much_is_any_value():
    """More faults than are looked for, and a product of choices that is too large."""
    faults = {f"p{n}": {"type": "string", "minLength": -n} for n in range(1, 100)}
    assert loosely({"type": "object", "properties": faults}) == {}
    choices = [{"anyOf": [of(TEXT, required=[f"{n}{m}"]) for m in range(8)]} for n in range(6)]
    assert loosely({"allOf": choices}) == {}
    assert fault({"allOf": choices}) == ""


def test_the_same_fault_everywhere_is_one():
    """As of a library that calls any value's type `any`. Guards a schema that is given up."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "any"} for n in range(100)}}
    schema["properties"]["q"] = TEXT
    assert loosely(schema)["properties"] == {f"p{n}": {} for n in range(100)} | {"q": TEXT}
