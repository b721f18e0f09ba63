package process

// ExitError is an error for which a command ends with a code other than 1, which the command's help names.
type ExitError struct {
	Code int
	Err  error
}

// Error is what went wrong.
func (e *ExitError) Error() string { return e.Err.Error() }

// Unwrap returns what went wrong.
func (e *ExitError) Unwrap() error { return e.Err }
