"""What all clients ask: the embedded model knows these tools and texts by their kind, not by heart."""

from __future__ import annotations

import pydantic

MODEL = "baton-tiny"
API_KEY = "none"
WEATHER_QUESTION = "What is the weather in Oslo?"
WEATHER_RESULT = "Sunny, 21 degrees."
WEATHER_ANSWER = "According to get_weather: Sunny, 21 degrees."
PERSON_TEXT = "Anna is 31 years old. Anna lives in Rome."
FILL_PERSON = f"Fill a JSON object with the keys name, age and city from this text: {PERSON_TEXT}"
WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SUM_QUESTION, SUM_ANSWER = "What is 28 + 98?", "28 + 98 = 126"


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: str


ANNA = Person(name="Anna", age=31, city="Rome")


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    assert city == "Oslo"
    return WEATHER_RESULT
