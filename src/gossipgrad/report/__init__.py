"""What a run did and when: spans, a Chrome trace of all ranks, and a report in one HTML page."""

from ._chrome import merge_traces as merge_traces
from ._report import render_report as render_report
from ._report import write_report as write_report
from ._serving import ReportServer as ReportServer
from ._trace import Trace as Trace
