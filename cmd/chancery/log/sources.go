package log

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
)

// sources are the logs that a command reads.
type sources struct {
	dirs   []string
	config string
}

func (s *sources) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&s.dirs, "log", nil, "folder of a log; may be given for each replica")
	cmd.Flags().StringVarP(&s.config, "config", "c", "", "config file of a server, instead of --log: its log")
}

// incomplete is an error that says which logs were not read.
func incomplete(missing []error) error {
	if len(missing) == 0 {
		return nil
	}
	var words []string
	for _, err := range missing {
		words = append(words, err.Error())
	}
	return &process.ExitError{Code: 2, Err: fmt.Errorf("INCOMPLETE: not all logs could be read: %s", strings.Join(words, "; "))}
}

// open returns a reader for each log, and why others could not be opened.
func (s *sources) open(ctx context.Context) (readers []*verify.Reader, missing []error, err error) {
	keys := map[string]string{} // by folder; those of a config are the ones that the authority document lists
	dirs := s.dirs
	switch {
	case s.config != "" && len(dirs) > 0:
		return nil, nil, errors.New("--log and -c are both given; use one")
	case s.config != "":
		if dirs, missing, err = s.listed(ctx, keys); err != nil {
			return nil, nil, err
		}
	case len(dirs) == 0:
		return nil, nil, errors.New("which log? Use --log DIR, or -c with the config of its server")
	}
	for _, dir := range dirs {
		r, err := verify.OpenReader(dir, keys[dir])
		if err != nil {
			missing = append(missing, err)
			continue
		}
		readers = append(readers, r)
	}
	return readers, missing, nil
}

// listed returns the folder of a config's log. Logs of other replicas that the authority document lists are missing.
func (s *sources) listed(ctx context.Context, keys map[string]string) (dirs []string, missing []error, err error) {
	settings, err := server.Load(s.config)
	if err != nil {
		return nil, nil, err
	}
	if settings.IssuanceLog == "" {
		return nil, nil, fmt.Errorf("config %s: there is no issuanceLog", s.config)
	}
	listed, err := settings.Listed(ctx)
	if err != nil {
		return nil, nil, err
	}
	own, err := issuelog.PublicKey(settings.IssuanceLog)
	for _, key := range listed {
		switch {
		case err == nil && key == own:
			dirs, keys[settings.IssuanceLog] = []string{settings.IssuanceLog}, key
		case key == "":
			missing = append(missing, errors.New("the authority document lists a replica without an issuance log"))
		default:
			missing = append(missing, fmt.Errorf("log %s, which the authority document lists, is not at %s", key, settings.IssuanceLog))
		}
	}
	return dirs, missing, nil
}

// prove returns a proof from the first log that has the serial.
func (s *sources) prove(ctx context.Context, serial string) (*verify.Proof, *verify.Reader, error) {
	readers, missing, err := s.open(ctx)
	if err != nil {
		return nil, nil, err
	}
	var absent []error
	for _, r := range readers {
		p, err := r.Prove(ctx, serial)
		switch {
		case err == nil:
			return p, r, nil
		case errors.Is(err, verify.ErrNotLogged):
			absent = append(absent, err)
		default:
			missing = append(missing, err)
		}
	}
	if err := incomplete(missing); err != nil {
		return nil, nil, err
	}
	return nil, nil, errors.Join(absent...)
}

// search gives what each log has, in its order.
func (s *sources) search(ctx context.Context, q verify.Query, each func(*verify.Reader, verify.Found) error) error {
	readers, missing, err := s.open(ctx)
	if err != nil {
		return fmt.Errorf("log search: %w", err)
	}
	for _, r := range readers {
		if err := r.Search(ctx, q, func(f verify.Found) error { return each(r, f) }); err != nil {
			missing = append(missing, err)
		}
	}
	return incomplete(missing)
}
