"""Wrong fields of a job."""

import dataclasses

import pydantic

from queue_core import Context, Job


class SendEmail(Job):
    to: str
    copies: int = 1

    async def run(self, ctx: Context) -> None:
        self.too  # rejected  # noqa: B018


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive(Job):
    year: int


class Report(pydantic.BaseModel, Job):
    year: int


SendEmail()  # rejected
SendEmail(too="ada")  # rejected
SendEmail(to=5)  # rejected
SendEmail("ada", "2")  # rejected
SendEmail("ada", 2, 3)  # rejected
SendEmail(to=None)  # rejected
Archive(yaer=2030)  # rejected
Archive(year="2030")  # rejected
Report(yaer=2030)  # rejected
Report(year=[2030])  # rejected
