package server

import (
	"context"
	"io"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/server/answering"
	printed "github.com/chancery-project/chancery/cmd/chancery/server/show"
)

// show prints the authorities: as a running server says, or from the store if none runs here (decision D14).
func show(ctx context.Context, s *Settings, format string, out io.Writer) error {
	var resp *chanceryv1.GetAuthoritiesResponse
	err := s.EitherWay(ctx, func() error {
		st, err := s.OpenState(ctx)
		if err != nil {
			return err
		}
		defer st.Store.Close()
		resp, err = answering.Describe(st.Document)
		return err
	}, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
		resp, err = c.GetAuthorities(ctx, &chanceryv1.GetAuthoritiesRequest{})
		return err
	})
	if err != nil {
		return err
	}
	return printed.Print(out, format, resp)
}
