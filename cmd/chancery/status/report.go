package status

import (
	"fmt"
	"io"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Report is what status and doctor print as JSON. Its shape is stable: fields are added, never changed.
type Report struct {
	Severity checkup.Severity  `json:"severity"` // the worst of the findings
	Findings []checkup.Finding `json:"findings"`
	Checked  []string          `json:"checked,omitempty"` // what doctor looked at
	CA       *checkup.State    `json:"ca,omitempty"`      // absent where it is not known
	Agent    any               `json:"agent,omitempty"`   // in `doctor` of an agent
}

// NewReport sorts the findings, the worst first.
func NewReport(findings []checkup.Finding) *Report {
	if findings == nil {
		findings = []checkup.Finding{}
	}
	checkup.Sort(findings)
	return &Report{Severity: checkup.Worst(findings), Findings: findings}
}

// Err returns what makes the command end with the severity's exit code; nil if all is well.
func (r *Report) Err(command string) error {
	if r.Severity == checkup.OK {
		return nil
	}
	return &process.ExitError{Code: r.Severity.ExitCode(), Err: fmt.Errorf("%s: %d critical, %d warnings", command,
		checkup.CountOf(r.Findings, checkup.Critical), checkup.CountOf(r.Findings, checkup.Warning))}
}

// PrintFindings prints each finding with what it means and what to do.
func (r *Report) PrintFindings(out io.Writer) {
	for _, f := range r.Findings {
		fmt.Fprintf(out, "%-8s  %s  %s %s\n", f.Severity, f.ID, process.Printable(f.Subject), process.Printable(f.Problem))
		fmt.Fprintf(out, "          means: %s\n", f.Meaning)
		fmt.Fprintf(out, "          do:    %s\n", f.Remedy)
	}
}
